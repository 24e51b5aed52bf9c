"""A prefill or decode rank in a process of its own, told what to do by JSON lines: MODE ENGINE SETTINGS_JSON."""

import json
import sys

from conftest import Side, claim, offer
from kvferry.presets import page_major


class Worker:
    def __init__(self, mode, engine, settings):
        heads = settings.pop("heads", (0, 2))
        layout = page_major(
            "toy", layers=3, kv_heads=2, head_dim=8, dtype="float16", pages=32, page_tokens=16, heads=tuple(heads)
        )
        self.side = Side(mode, engine, layout, **settings)
        self.rooms = {}

    def offer(self, room, pages, seed=None, send=True):
        if seed is not None:
            self.side.fill(pages, seed)
        self.rooms[room] = offer(self.side, room, pages, send=send)

    def claim(self, room, pages, endpoint):
        self.rooms[room] = claim(self.side, endpoint, room, pages)

    def abort(self, room, reason):
        self.rooms[room].abort(reason)

    def clear(self, room):
        self.rooms.pop(room).clear()

    def look(self, room):
        error = self.rooms[room].failure()
        return {
            "poll": self.rooms[room].poll().name,
            "safe": self.rooms[room].is_release_safe(),
            "error": str(error or ""),
        }

    def engine(self, call):
        getattr(self.side.engine, call)()

    def delay(self, seconds):
        self.side.engine.delay_s = seconds

    def held(self):
        return self.side.engine.held

    def end(self, code):
        """As a program that does not shut its manager down."""
        sys.exit(code)


def main():
    worker = Worker(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    print(json.dumps(worker.side.manager.endpoint), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)
    worker.side.manager.shutdown()


if __name__ == "__main__":
    main()
