"""One peer: a thread with an instance of its own, since the library's calls block and its failures spread.

While the library asks a stopped process for its metadata, for a minute, all other transfers of the same instance
wait for a lock; and after a failure only a new instance is sure to work. With an instance per peer both concern that
peer only.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.engines.mooncake import quiet
from kvferry.engines.mooncake.blob import Blob
from kvferry.engines.mooncake.instance import Instance, Place
from kvferry.engines.seam import Done, Outcome, Region, Ticket
from kvferry.errors import EngineError
from kvferry.ids import PeerId
from kvferry.plan.batch import Batch

log = logging.getLogger("kvferry.mooncake")

TOGETHER_BYTES = 64 << 20
"""Of one call, which has the library's time limit for all of it."""

LOOK_AGAIN_S, LOOK_AGAIN_MOST_S = 0.05, 1.0
"""After what time, doubled each time, it is looked again whether a target has gone."""


@dataclass
class Attaching:
    """A request to connect.

    Attributes:
        ticket: its ticket.
        blob: what the peer said.
        until: when nobody waits for it any more, on the monotonic clock.
    """

    ticket: Ticket
    blob: Blob
    until: float


@dataclass
class Writing:
    """A batch that was checked."""

    ticket: Ticket
    batch: Batch


class Unproven(NamedTuple):
    """A batch that failed: its instance is destroyed, but it is not proven quiet yet.

    Attributes:
        ticket: its ticket.
        target: where it was written to.
    """

    ticket: Ticket
    target: Blob


class Peer:
    """Does one thing at a time for one peer; what becomes of it is reported from the thread.

    Attributes:
        unproven: what ended FAILED_UNKNOWN and is not proven quiet; one list for all epochs of a process, since a later
            one looks after what an earlier one has left.
        rebuilds: how many instances were given up after a failure.
        target: where the peer is written to; None if it is not attached.
    """

    def __init__(
        self,
        name: PeerId,
        place: Place,
        regions: Callable[[], tuple[Region, ...]],
        report: Callable[[Done], None],
        unproven: list[Unproven],
        before: Peer | None,
    ) -> None:
        self.name = name
        self.unproven = unproven
        self.rebuilds = 0
        self.target: Blob | None = None
        self._place = place
        self._regions = regions
        self._report = report
        self._before = before
        self._instance: Instance | None = None
        self._transport = ""
        self._left = False
        self._relieved = threading.Event()
        self._inbox: queue.SimpleQueue[Attaching | Writing | None] = queue.SimpleQueue()
        self._kept: deque[Attaching | Writing | None] = deque()  # taken out, and comes next
        self._thread = threading.Thread(target=self._main, name=f"kvferry-mooncake-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def post(self, work: Attaching | Writing) -> None:
        """Have it done after what was posted before."""
        self._inbox.put(work)

    def leave(self) -> None:
        """Begin nothing more; the thread ends when the library's call that is on has returned, and all is proven."""
        self._left = True
        self._inbox.put(None)

    def relieve(self) -> None:
        """Leave what is not proven to whoever comes after."""
        self._relieved.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)

    # -- the thread

    def _main(self) -> None:
        if self._before is not None:
            self._before.relieve()
            self._before.join()  # two instances would have more in flight to the peer than it takes
            self._before = None
        while (work := self._take()) is not None:
            try:
                self._attach(work) if isinstance(work, Attaching) else self._write(work)
            except Exception as error:
                log.exception("the mooncake engine failed with peer %s", self.name)
                works = [work] if isinstance(work, Attaching) else work
                self._give_up(works, f"the library raised {error!r}", type(error).__name__)
        self._drop()
        for pause_s in _pauses():
            if not self.unproven or self._relieved.wait(pause_s):
                break
            self._prove(self._is_gone)

    def _next(self) -> Attaching | Writing | None:
        """What was posted first; while it waits it looks after what is not proven."""
        for pause_s in _pauses():
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=pause_s if self.unproven else None)
            self._prove(self._is_gone)
        raise AssertionError

    def _take(self) -> Attaching | list[Writing] | None:
        """What comes next, batches that wait already together: between two calls the connections are idle."""
        first = self._kept.popleft() if self._kept else self._next()
        if not isinstance(first, Writing):
            return first
        found = [first]
        with contextlib.suppress(queue.Empty):
            while isinstance(following := self._inbox.get_nowait(), Writing) and _go_together([*found, following]):
                found.append(following)
            self._kept.append(following)
        return found

    def _attach(self, work: Attaching) -> None:
        self.target = None
        why = self._why_unattached(work)
        self._prove(self._is_quiet)
        if why:
            self._report(Done(work.ticket, Outcome.FAILED_QUIET, why, "attach"))
            return
        self.target = work.blob
        self._report(Done(work.ticket, Outcome.LANDED))

    def _why_unattached(self, work: Attaching) -> str:
        if self._left or time.monotonic() > work.until:
            return "it was detached" if self._left else "nobody waited for it any more"
        is_new = self._instance is None
        try:
            why = self._why_unreached(work.blob)
            if why and not is_new:
                self._drop()  # what it remembers of the session may be of a process that is no more
                why = self._why_unreached(work.blob)
        except EngineError as error:
            return str(error)
        if why:
            self._drop()
        return why

    def _why_unreached(self, blob: Blob) -> str:
        """Whether the peer answers, and is who it says; raises EngineError."""
        instance = self._ready()
        code = instance.probe(blob.session)
        if code:
            return f"no Mooncake engine answers at {blob.session} (send_probe returned {code})"
        read = instance.read(blob.session, blob.nonce_address)
        if read is None:
            return f"what answers at {blob.session} has not the memory that the peer named"
        return "" if blob.is_nonce(read) else f"what answers at {blob.session} is another process than the peer"

    def _write(self, works: Sequence[Writing]) -> None:
        if self._left or self.target is None:
            why = "detached" if self._left else "not attached, or no more since a write to it failed"
            self._tell(works, Outcome.FAILED_QUIET, f"peer {self.name} is {why}", "refused")
            return
        batches = [work.batch for work in works if len(work.batch)]
        try:
            instance = self._ready() if batches else None
        except EngineError as error:
            self._tell(works, Outcome.FAILED_QUIET, str(error), "register")
            return
        began = time.monotonic()
        code = instance.write(self.target.session, batches) if instance else 0
        if not code:
            self._tell(works, Outcome.LANDED)
            return
        self._give_up(works, _cause(self.target.session, batches, time.monotonic() - began), str(code))

    def _tell(self, works: Sequence[Attaching | Writing], outcome: Outcome, cause: str = "", native: str = "") -> None:
        for work in works:
            self._report(Done(work.ticket, outcome, cause, native))

    def _give_up(self, works: Sequence[Attaching | Writing], cause: str, native: str) -> None:
        """End the instance that failed: it would go on writing, and may never work again."""
        target, self.target = self.target, None
        self._drop()
        self.rebuilds += 1
        if isinstance(works[0], Attaching) or target is None:
            self._tell(works, Outcome.FAILED_QUIET, cause, native)
            return
        self.unproven += [Unproven(work.ticket, target) for work in works]
        self._tell(works, Outcome.FAILED_UNKNOWN, cause, native)
        self._prove(self._is_quiet)

    def _prove(self, is_quiet: Callable[[Blob], bool]) -> None:
        """Say QUIET for what failed before, where that can be shown now: that nothing lands at a target any more."""
        left = list(self.unproven)  # a later one is not covered by the proofs
        targets = {each.target.session: each.target for each in left}
        quiet_at = {session for session, target in targets.items() if is_quiet(target)}
        for each in left:
            if each.target.session in quiet_at:
                with contextlib.suppress(ValueError):  # another epoch's thread has proven it meanwhile
                    self.unproven.remove(each)
                    self._report(Done(each.ticket, Outcome.QUIET))

    def _is_gone(self, target: Blob) -> bool:
        """Whether a target has ended or has shut this writer out; seen again and again, since it ends in steps."""
        by_tcp = target.transport == "tcp" == self._transport
        return by_tcp and quiet.is_gone(target.session, target.data_ports)

    def _is_quiet(self, target: Blob) -> bool:
        """Whether it is gone, or nothing that was begun before can land there any more."""
        instance = self._instance
        if self._is_gone(target):
            return True
        if target.transport != "tcp" or instance is None or instance.transport != "tcp":
            return False
        return not instance.probe(target.session) and quiet.is_drained(
            target.data_ports, lambda: target.is_nonce(instance.read(target.session, target.nonce_address) or b"")
        )

    def _ready(self) -> Instance:
        """The instance, with the memory registered that counts now; raises EngineError."""
        if self._instance is None:
            self._instance = Instance(self._place)
            self._transport = self._instance.transport
        self._instance.register(self._regions())
        return self._instance

    def _drop(self) -> None:
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.close()


def _pauses() -> Iterator[float]:
    pause_s = LOOK_AGAIN_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LOOK_AGAIN_MOST_S)


def _go_together(works: Sequence[Writing]) -> bool:
    """Whether these batches may be in flight at once."""
    rows, nbytes = sum(len(work.batch) for work in works), sum(work.batch.total_bytes for work in works)
    return rows <= quiet.LIMITS.rows and nbytes <= TOGETHER_BYTES


def _cause(session: str, batches: Sequence[Batch], seconds: float) -> str:
    rows = sum(map(len, batches))
    return (
        f"Mooncake's batch_transfer_sync_write of {rows} rows to {session} failed after {seconds:.2f} s; it does "
        "not say why: the peer may be gone, stopped or slow, or the rows outside of what it has registered"
    )
