"""One peer: a thread with an instance of its own, since the library's calls wait for the other process.

What the library knows of a peer it forgets with its engine only (queue pairs, opened memory), and after a lost port
only a new engine works. With an instance per peer both concern that peer only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.engines.host import Process, has_ended, host_identity
from kvferry.engines.mori import door
from kvferry.engines.mori.blob import Blob
from kvferry.engines.mori.flight import Flight
from kvferry.engines.mori.instance import Instance, Place
from kvferry.engines.mori.limbo import Limbo, Unfinished
from kvferry.engines.mori.memory import Memory, why_not_between
from kvferry.engines.per_peer import Attaching, PeerThread, Writing
from kvferry.engines.seam import Batch, Done, Outcome, Region, Ticket
from kvferry.errors import EngineError
from kvferry.ids import PeerId

log = logging.getLogger("kvferry.mori")

HEAR_EVERY_S = 0.5
"""How often an idle peer is asked about: the library notices the loss of a port, and not that of an idle peer."""


_KEPT_EVENTS = 20


@dataclass
class Target:
    """Where an attached peer is written to.

    Attributes:
        blob: what it said.
        memory: its memory, with the library's descriptors.
    """

    blob: Blob
    memory: Memory

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        return self.blob.process is not None and has_ended(self.blob.process)


class Peer(PeerThread[Blob]):
    """Writes with one instance, which it parts with after a failure.

    Attributes:
        target: where the peer is written to; None if it is not attached.
    """

    def __init__(
        self,
        name: PeerId,
        place: Place,
        regions: Callable[[], tuple[Region, ...]],
        report: Callable[[Done], None],
        limbo: Limbo,
        timeout_s: float,
    ) -> None:
        super().__init__("mori", name, report)
        self.target: Target | None = None
        self._place = place
        self._regions = regions
        self._limbo = limbo
        self._timeout_s = timeout_s
        self._instance: Instance | None = None

    @property
    def where(self) -> str:
        """Whether it is attached."""
        return "attached" if self.target else "not attached"

    # -- the thread

    def _broke(self, works: Sequence[Attaching[Blob] | Writing], cause: str, native: str) -> None:
        self._drop()
        quiet = isinstance(works[0], Attaching)
        self._tell(works, Outcome.FAILED_QUIET if quiet else Outcome.FAILED_UNKNOWN, cause, native)

    def _idle_s(self) -> float:
        return HEAR_EVERY_S

    def _idle(self) -> None:
        self._hear()
        if self._instance is not None:
            self._instance.rest()

    def _attach(self, work: Attaching[Blob]) -> None:
        self._drop()  # the old one's queue pairs, or opened memory, may be of a process that is no more
        why = self._why_unattached(work)
        if why:
            self._drop()
            self._tell([work], Outcome.FAILED_QUIET, f"peer {self.name}: {why}", "attach")
        else:
            self._tell([work], Outcome.LANDED)

    def _why_unattached(self, work: Attaching[Blob]) -> str:
        if self.left or time.monotonic() > work.until:
            return "it was detached" if self.left else "nobody waited for it any more"
        why = _why_nobody_there(work.blob)
        if why:
            return why
        try:
            instance = self._ready()
            memory = instance.introduce(work.blob)
            why = instance.why_unreachable(work.blob, memory, work.until)
        except (EngineError, RuntimeError) as error:
            return str(error)
        if not instance.reading.over:
            self._give_up(None, instance.reading, work.blob.process)
        elif not why:
            self.target = Target(work.blob, memory)
        return why

    def _write(self, works: Sequence[Writing]) -> None:
        (work,) = works
        target, batch = self.target, work.batch
        why = self._why_unwritten(target, batch)
        if why or target is None or self._instance is None:
            self._tell(works, Outcome.FAILED_QUIET, why, "refused")
            return
        if not len(batch):
            self._tell(works, Outcome.LANDED)
            return
        flight = self._instance.write(batch, target.memory)
        flight.wait(time.monotonic() + self._timeout_s)
        outcome, cause, native = flight.verdict()
        if outcome is Outcome.LANDED and target.has_ended:
            outcome, cause, native = Outcome.FAILED_QUIET, "it was copied, and its process has ended", "ended"
        if outcome is not Outcome.LANDED:
            cause = "; ".join([f"peer {self.name}: {cause}", *self._hear()])
        self._tell(works, outcome, cause, native)
        if outcome is Outcome.FAILED_UNKNOWN:
            self._give_up(work.ticket, flight, target.blob.process)

    def _why_unwritten(self, target: Target | None, batch: Batch) -> str:
        """Why a batch can't be begun, or ""."""
        if self.left or target is None:
            why = "detached" if self.left else "not attached, or no more since it was lost"
            return f"peer {self.name} is {why}"
        if target.has_ended:
            self._drop()
            return f"peer {self.name}: its process has ended"
        try:
            instance = self._ready()
        except EngineError as error:
            return str(error)
        return why_not_between(batch, instance.memory, target.memory, self.name)

    def _hear(self) -> list[str]:
        """What the library says of this peer; one that it has lost is not attached any more."""
        said = [] if self._instance is None else self._instance.hear()
        if said:
            log.warning("MORI says of peer %s: %s", self.name, said[-1])
            self.events = [*self.events, *said][-_KEPT_EVENTS:]
            self.target = None
        return said

    def _give_up(self, ticket: Ticket | None, flight: Flight, process: Process | None) -> None:
        """Part with the instance that failed, which has to stay until nothing is on its way."""
        instance, self._instance, self.target = self._instance, None, None
        self.rebuilds += 1
        if instance is not None:
            self._limbo.add(Unfinished(ticket, flight, instance, process))

    def _ready(self) -> Instance:
        """The instance, with the memory registered that counts now; raises EngineError."""
        if self._instance is None:
            self._instance = Instance(self._place)
        self._instance.register(self._regions())
        return self._instance

    def _drop(self) -> None:
        instance, self._instance, self.target = self._instance, None, None
        if instance is not None:
            instance.close()


def _why_nobody_there(blob: Blob) -> str:
    """Why a peer that the library does not ask is not there, or ""."""
    if not blob.door:
        return ""
    if blob.process is None or blob.process.host != host_identity():
        return "it runs on another host, or does not say where; XGMI reaches processes of this one"
    return door.why_nobody(blob.door, blob.process)
