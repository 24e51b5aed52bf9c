"""What the SGLang-shaped schedulers of both sides stand on: process group, stream, queues, one thread per rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from pools import FREE, PAGE_TOKENS, Pool, Request

from kvferry import KVManager, KVReceiver, KVSender, poll_group
from kvferry.api.group import GroupState, MinReduce
from kvferry.errors import RoomInUse

SETTINGS: dict[str, Any] = {
    "tick_s": 0.05, "claim_timeout_s": 6.0, "bootstrap_timeout_s": 6.0, "drain_limit_s": 2.0,
    "heartbeat_s": 0.2, "heartbeat_timeout_s": 0.6,
}  # fmt: skip
"""Short times: what waits for a time-out is over soon."""

Command = tuple[str, Any]


class Outcome(NamedTuple):
    """How a request left its last queue; `text` is "" for a success."""

    step: int
    room: int
    queue: str
    text: str


class RankGroup:
    """A process group in memory: every rank makes the same calls in the same order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self.barrier.wait(20)
        found = list(self._slots)
        self.barrier.wait(20)
        return found

    def all_reduce(self, rank: int) -> MinReduce:
        return lambda array: np.minimum.reduce(self.gather(rank, array))


class StreamEvent:
    """What a forward records behind its kernels."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Stream:
    """Work that is done `delay` steps after it was launched; 0 is at once."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self._queue: deque[tuple[int, Callable[[], None], StreamEvent]] = deque()
        self._now = 0

    def launch(self, work: Callable[[], None]) -> StreamEvent:
        event = StreamEvent()
        self._queue.append((self._now + self.delay, work, event))
        if not self.delay:
            self._run()
        return event

    def advance(self) -> None:
        self._now += 1
        self._run()

    def _run(self) -> None:
        while self._queue and self._queue[0][0] <= self._now:
            _, work, event = self._queue.popleft()
            work()
            event.done = True


@dataclass
class Entry:
    """One request on one rank."""

    request: Request
    handle: KVSender | KVReceiver
    pages: list[int] = field(default_factory=list)
    cached_pages: list[int] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    sent_pages: int = 0
    bootstrapped: bool = False
    attempts: int = 0
    events: list[StreamEvent] = field(default_factory=list)

    @property
    def sender(self) -> KVSender:
        assert isinstance(self.handle, KVSender)
        return self.handle

    @property
    def receiver(self) -> KVReceiver:
        assert isinstance(self.handle, KVReceiver)
        return self.handle

    @property
    def num_pages(self) -> int:
        return -(-len(self.request.tokens) // PAGE_TOKENS)


Queue = dict[int, Entry]


class SchedulerRank:
    """What both sides have in common: queues by name, agreement of the ranks, deferred release."""

    stages: tuple[str, ...] = ()
    released_fill = FREE

    def __init__(self, mgr: KVManager, pool: Pool, group: RankGroup, rank: int, bootstrap_addr: str) -> None:
        self.mgr, self.pool, self.rank, self.bootstrap_addr = mgr, pool, rank, bootstrap_addr
        self.reduce = group.all_reduce(rank)
        self.queues: dict[str, Queue] = {name: {} for name in (*self.stages, "held")}
        self.log: list[Outcome] = []
        self.paused: set[str] = set()
        self.steps = 0
        self._serial = 0

    def create(self, request: Request) -> Entry:
        raise NotImplementedError

    def run_queues(self) -> None:
        raise NotImplementedError

    def step(self, commands: Sequence[Command]) -> None:
        self.steps += 1
        for name, argument in commands:
            getattr(self, f"on_{name}")(argument)
        self.release_held()
        self.run_queues()

    # -- commands; all ranks get them in the same step

    def on_add(self, request: Request) -> None:
        self._serial += 1
        try:
            self.queues[self.stages[0]][self._serial] = self.create(request)
        except RoomInUse as error:
            self.log.append(Outcome(self.steps, request.room, "rejected", str(error)))

    def on_abort(self, room: int) -> None:
        for name in self.stages:
            for entry in self.queues[name].values():
                if entry.request.room == room:
                    entry.handle.abort(f"the client of room {room} went away")

    def on_abort_on_rank(self, argument: tuple[int, int]) -> None:
        room, rank = argument
        if rank == self.rank:
            self.on_abort(room)

    def on_hold(self, name: str) -> None:
        self.paused.add(name)

    def on_resume(self, name: str) -> None:
        self.paused.discard(name)

    # -- for the queues

    def poll(self, queue: str) -> dict[int, GroupState]:
        """Poll a queue on all ranks: MIN of the states, and only rooms that all ranks have."""
        return poll_group({serial: entry.handle for serial, entry in self.queues[queue].items()}, self.reduce)

    def fail(self, queue: str, serial: int) -> None:
        """The ranks agreed that a room failed: say why, give up the room number, keep the pages for now."""
        entry = self.queues[queue].pop(serial)
        error = entry.handle.failure()
        if error is None:  # this rank's own room is well
            entry.handle.abort("another rank of this side failed")
        entry.handle.clear()
        self.queues["held"][serial] = entry
        text = str(error) if error else "failed on another rank"
        self.log.append(Outcome(self.steps, entry.request.room, queue, text))

    def finish(self, queue: str, serial: int) -> None:
        entry = self.queues[queue].pop(serial)
        entry.handle.clear()
        self.log.append(Outcome(self.steps, entry.request.room, queue, ""))
        self.release(entry)

    def release_held(self) -> None:
        for serial, state in self.poll("held").items():
            entry = self.queues["held"][serial]
            if state.is_release_safe and all(event.done for event in entry.events):
                del self.queues["held"][serial]
                self.release(entry)

    def release(self, entry: Entry) -> None:
        self.pool.give_back(entry.pages + entry.cached_pages, entry.slot, self.released_fill)

    # -- for tests, from their thread

    def where(self, room: int) -> str:
        names = [name for name, queue in self.queues.items() for e in list(queue.values()) if e.request.room == room]
        return names[0] if names else ""

    def outcome(self, room: int, nth: int = 0) -> Outcome | None:
        """The nth end that a request with this room number came to here."""
        found = [outcome for outcome in list(self.log) if outcome.room == room]
        return found[nth] if nth < len(found) else None


class Fleet:
    """All ranks of one side, each with a thread; commands reach all of them in the same step."""

    def __init__(self, group: RankGroup, ranks: Sequence[SchedulerRank]) -> None:
        self.group, self.ranks = group, list(ranks)
        self.errors: list[BaseException] = []
        self._inbox: deque[Command] = deque()
        self._threads = [threading.Thread(target=self._main, args=(rank,), name=f"rank{rank.rank}") for rank in ranks]
        for thread in self._threads:
            thread.start()

    def tell(self, name: str, argument: Any = None) -> None:
        self._inbox.append((name, argument))

    def outcome(self, room: int, nth: int = 0) -> Outcome | None:
        """The nth end of the room, once all ranks have it; they must agree in step, queue and success."""
        found = [rank.outcome(room, nth) for rank in self.ranks]
        if any(outcome is None for outcome in found):
            return None
        assert len({(o.step, o.queue, not o.text) for o in found if o}) == 1, found
        return found[0]

    def where(self, room: int) -> str:
        places = {rank.where(room) for rank in self.ranks}
        return places.pop() if len(places) == 1 else "between steps"

    def stop(self) -> None:
        self.tell("stop")
        for thread in self._threads:
            thread.join(20)

    def _main(self, rank: SchedulerRank) -> None:
        try:
            while True:
                mine = [self._inbox.popleft() for _ in range(len(self._inbox))] if rank.rank == 0 else []
                commands = self.group.gather(rank.rank, mine)[0]
                if ("stop", None) in commands:
                    return
                rank.step(commands)
                time.sleep(0.001)
        except threading.BrokenBarrierError:
            return  # the rank that broke it has said why
        except BaseException as error:
            self.errors.append(error)
            self.group.barrier.abort()
