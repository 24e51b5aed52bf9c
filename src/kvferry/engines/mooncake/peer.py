"""One peer: a thread with an instance of its own, since the library's calls block and its failures spread.

While the library asks a stopped process for its metadata, for a minute, all other transfers of the same instance
wait for a lock; and after a failure only a new instance is sure to work. With an instance per peer both concern that
peer only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvferry.engines.mooncake import quiet
from kvferry.engines.mooncake.blob import Blob
from kvferry.engines.mooncake.instance import Instance, Place
from kvferry.engines.per_peer import Attaching, PeerThread, Writing
from kvferry.engines.seam import Batch, Done, Outcome, Region, Ticket
from kvferry.errors import EngineError
from kvferry.ids import PeerId

TOGETHER_BYTES = 64 << 20
"""Of one call, which has the library's time limit for all of it."""

LOOK_AGAIN_S, LOOK_AGAIN_MOST_S = 0.05, 1.0
"""After what time, doubled each time, it is looked again whether a target has gone."""


class Unproven(NamedTuple):
    """A batch that failed: its instance is destroyed, but it is not proven quiet yet.

    Attributes:
        ticket: its ticket.
        target: where it was written to.
    """

    ticket: Ticket
    target: Blob


class Peer(PeerThread[Blob]):
    """Writes with one instance; looks after what failed until it is proven quiet, also after it was left.

    Attributes:
        unproven: what ended FAILED_UNKNOWN and is not proven quiet; one list for all epochs of a process, since a later
            one looks after what an earlier one has left.
        target: where the peer is written to; None if it is not attached.
    """

    def __init__(
        self,
        name: PeerId,
        place: Place,
        regions: Callable[[], tuple[Region, ...]],
        report: Callable[[Done], None],
        unproven: list[Unproven],
        before: PeerThread[Blob] | None,
    ) -> None:
        super().__init__("mooncake", name, report)
        self.unproven = unproven
        self.target: Blob | None = None
        self._place = place
        self._regions = regions
        self._before = before
        self._instance: Instance | None = None
        self._transport = ""
        self._relieved = threading.Event()
        self._pauses = _pauses()

    @property
    def where(self) -> str:
        """Its session, or "not attached"."""
        return self.target.session if self.target is not None else "not attached"

    def relieve(self) -> None:
        """Leave what is not proven to whoever comes after."""
        self._relieved.set()

    # -- the thread

    def _begin(self) -> None:
        if self._before is not None:
            self._before.relieve()
            self._before.join()  # two instances would have more in flight to the peer than it takes
            self._before = None

    def _end(self) -> None:
        while self.unproven and not self._relieved.wait(next(self._pauses)):
            self._prove(self._is_gone)

    def _idle_s(self) -> float | None:
        return next(self._pauses) if self.unproven else None

    def _idle(self) -> None:
        self._prove(self._is_gone)

    def _attach(self, work: Attaching[Blob]) -> None:
        self.target = None
        why = self._why_unattached(work)
        self._prove(self._is_quiet)
        if why:
            self._tell([work], Outcome.FAILED_QUIET, why, "attach")
            return
        self.target = work.blob
        self._tell([work], Outcome.LANDED)

    def _why_unattached(self, work: Attaching[Blob]) -> str:
        if self.left or time.monotonic() > work.until:
            return "it was detached" if self.left else "nobody waited for it any more"
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
        if self.left or self.target is None:
            why = "detached" if self.left else "not attached, or no more since a write to it failed"
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

    def _goes_with(self, works: Sequence[Writing], following: Writing) -> bool:
        """Whether these batches may be in flight at once."""
        together = [*works, following]
        rows, nbytes = sum(len(work.batch) for work in together), sum(work.batch.total_bytes for work in together)
        return rows <= quiet.LIMITS.rows and nbytes <= TOGETHER_BYTES

    def _broke(self, works: Sequence[Attaching[Blob] | Writing], cause: str, native: str) -> None:
        self._give_up(works, cause, native)

    def _give_up(self, works: Sequence[Attaching[Blob] | Writing], cause: str, native: str) -> None:
        """End the instance that failed: it would go on writing, and may never work again."""
        target, self.target = self.target, None
        self.rebuilds += 1
        if isinstance(works[0], Attaching) or target is None:
            self._drop()
            self._tell(works, Outcome.FAILED_QUIET, cause, native)
            return
        self.unproven += [Unproven(work.ticket, target) for work in works]  # before anything that may raise
        self._pauses = _pauses()
        self._tell(works, Outcome.FAILED_UNKNOWN, cause, native)
        self._drop()
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


def _cause(session: str, batches: Sequence[Batch], seconds: float) -> str:
    rows = sum(map(len, batches))
    return (
        f"Mooncake's write of {rows} rows to {session} failed after {seconds:.2f} s; the library does "
        "not say why: the peer may be gone, stopped or slow, or the rows outside of what it has registered"
    )
