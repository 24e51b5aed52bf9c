"""Agents that copy beside the engine's own, and as many threads.

By cross-memory attach the library copies inside of the call that begins a transfer, on the thread that calls, and calls
to one agent wait for each other: one processor copies, and the engine does nothing else meanwhile. Where that was seen
of a large batch, further agents connect to the same peer and copy all large batches from then on, a part on each
thread. Where a card or the kernel moves the bytes such a call returns at once, and there are none.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, wait

from kvferry.engines.nixl.agent import Agent
from kvferry.engines.nixl.farewell import Attachment
from kvferry.engines.nixl.lane import Lane
from kvferry.engines.nixl.memory import Rows
from kvferry.engines.nixl.transfer import Aside, Transfer
from kvferry.engines.rows import SPLIT_BYTES, cut, shares
from kvferry.engines.seam import Region
from kvferry.plan.batch import Batch
from kvferry.workers import Workers

log = logging.getLogger("kvferry.engines")


class Lanes:
    """All of them; none until there is something for them to do. Called by the engine's thread, unless said."""

    def __init__(self, number: int, make: Callable[[], Agent], timeout_s: float) -> None:
        """Prepare them.

        Args:
            number: how many copy at once; below 2 the engine copies alone.
            make: makes an agent, on any thread; that takes some 20 ms.
            timeout_s: after how many seconds a peer that can't be connected to is given up.
        """
        self._number = number if number > 1 else 0
        self._make = make
        self._timeout_s = timeout_s
        self._threads: Workers | None = None
        self._lanes: list[Lane] = []
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        self._wanted: set[Attachment] = set()
        self._regions: Sequence[Region] = ()
        self._bell = threading.Event()
        self._out: list[Future[bool]] = []
        self._problem = ""

    # -- connecting

    def want(self, attachment: Attachment) -> None:
        """The library has copied a large batch to a peer inside of a call: have the lanes do so from now on."""
        if not self._number or self._problem:
            return
        self._wanted.add(attachment)
        if self._threads is None:
            self._start()
        for lane in self._lanes:
            lane.connect(attachment)

    def leave(self, attachment: Attachment) -> None:
        """Begin nothing more there."""
        self._wanted.discard(attachment)
        for lane in self._lanes:
            lane.leave(attachment)

    def register(self, regions: Sequence[Region]) -> None:
        """Replace the memory that is read, after `drain`."""
        self._regions = regions
        for lane in self._lanes:
            lane.register(regions)

    def step(self, in_use: Callable[[], Set[str]], now: float) -> None:
        """Go on connecting, while nothing is copied: calls to an agent that copies wait.

        Args:
            in_use: gives the agents of peers to which something is under way.
            now: on the monotonic clock.
        """
        if self._lanes and self._free.qsize() == len(self._lanes):
            for lane in self._lanes:
                lane.step(in_use, now)

    def doubt(self, name: str) -> None:
        """A transfer to a peer's agent has failed: it is connected anew when it is needed again."""
        for lane in self._lanes:
            lane.doubt(name)

    def forget_unused(self, wanted: Set[str]) -> None:
        """Forget agents of peers as the engine does."""
        for lane in self._lanes:
            lane.forget_unused(wanted)

    # -- copying

    def parts(self, attachment: Attachment, batch: Batch) -> list[Batch]:
        """What `write` is to be called for; nothing where the engine's own agent is to write the batch."""
        if batch.total_bytes < SPLIT_BYTES or attachment not in self._wanted:
            return []
        if not self._lanes or not all(lane.reaches(attachment) for lane in self._lanes):
            return []
        return [cut(batch, *share)[0] for share in shares(batch.total_bytes, len(self._lanes))]

    def write(self, peer: str, here: Rows, there: Rows) -> Transfer:
        """Make a transfer that one of the threads begins."""
        assert self._threads is not None
        return Aside(self._submit, self._free, lambda lane: lane.write(peer, here, there), self._bell.set)

    def drain(self, limit_s: float) -> bool:
        """Wait until all that was begun by `write` is copied; says whether it is."""
        return not wait(self._out, limit_s).not_done

    def listen(self) -> None:
        """From now on `rest` returns when a transfer was begun."""
        if self._lanes:
            self._bell.clear()

    def rest(self, seconds: float) -> None:
        """Wait, until a lane has begun a transfer since `listen` at most."""
        self._bell.wait(seconds)

    # -- for people

    def info(self) -> dict[str, object]:
        """How many threads copy large batches by cross-memory attach, to how many peers, and why not more."""
        problem = self._problem or next((lane.problem for lane in list(self._lanes) if lane.problem), "")
        copied = sum(all(lane.reaches(each) for lane in list(self._lanes)) for each in list(self._wanted))
        return {
            "copy_threads": 1 if problem else max(len(self._lanes), 1),
            "copy_peers": copied if self._lanes else 0,
            "copy_problem": problem,
        }

    # -- the end

    def end_threads(self) -> None:
        """Wait for what is being copied; begin nothing more."""
        if self._threads is not None:
            self._threads.close()

    def forget_all(self) -> None:
        """Disconnect from all, before what is left of transfers is freed."""
        for lane in self._lanes:
            lane.forget_all()

    def close(self) -> None:
        """End the agents, after `end_threads` and `forget_all`."""
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()

    def _submit(self, task: Callable[[], bool]) -> Future[bool]:
        assert self._threads is not None
        begun = self._threads.submit(task)
        self._out = [each for each in self._out if not each.done()] + [begun]
        return begun

    def _start(self) -> None:
        self._threads = Workers(self._number, "kvferry-nixl-copy")
        if self._threads.problem:
            self._problem = self._threads.problem
            log.warning("NIXL copies with one thread: %s", self._problem)
            return
        for _ in range(self._number):
            lane = Lane(self._threads.submit(self._make), self._timeout_s)
            lane.register(self._regions)
            self._lanes.append(lane)
            self._free.put(lane)
