"""The demo's worker processes: `python -m kvferry.serve.worker prefill|decode`, one for each rank.

A worker says "ready", reads one request as a line of JSON, and reports what it does as events on standard output;
a line that says "go" begins the next step of all ranks of a side. How a request goes is in `serve.steps`.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from typing import TextIO

import msgspec

from kvferry.answers import take_stdio
from kvferry.errors import ConfigError, KvferryError
from kvferry.ids import Side
from kvferry.obs import EventWriter
from kvferry.serve.generate import require_worker_env
from kvferry.serve.rank import RankWorker, Request, Start
from kvferry.serve.steps import RUNS


class _Exit:
    """The way out at SIGTERM: by the manager's shutdown, from a thread of its own.

    A handler would raise in the main thread, maybe in the middle of a call of kvferry, whose state is lost then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: RankWorker | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._wait, name="sigterm", daemon=True).start()

    def by_way_of(self, worker: RankWorker) -> None:
        """There is a manager from now on."""
        self._worker = worker

    def shutdown(self) -> None:
        """Shut the manager down, if there is one, and not while it is being shut down."""
        with self._lock:
            if self._worker is not None:
                self._worker.manager.shutdown()

    def _wait(self) -> None:
        signal.sigwait({signal.SIGTERM})
        self.shutdown()
        os._exit(128 + signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Run a worker until its request is answered or its standard input ends."""
    way_out, answers = _Exit(), io.TextIOWrapper(take_stdio(), "utf-8")
    try:
        return _serve(Side(arguments[0]), way_out, answers)
    except BrokenPipeError:  # whoever started this worker is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), answers.fileno())
        return 1
    finally:
        way_out.shutdown()


def _serve(side: Side, way_out: _Exit, answers: TextIO) -> int:
    events = EventWriter(side.value, answers)
    try:
        require_worker_env()
        start = msgspec.json.decode(sys.stdin.readline(), type=Start)
        events = EventWriter(start.name, answers)
        worker = RankWorker(side, start, events)
        way_out.by_way_of(worker)
        line = sys.stdin.readline()
        if line.strip():
            RUNS[side](worker, msgspec.json.decode(line, type=Request))
            events.write("done")
            sys.stdin.readline()  # stay until the other side has read everything, and the parent says so
    except KvferryError as error:
        events.write("error", text=str(error), input=isinstance(error, ConfigError))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
