"""An engine of which each peer has a thread and an instance of the library of its own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from kvferry.engines.intervals import Intervals
from kvferry.engines.owner import Owner, not_open
from kvferry.engines.per_peer.served import MAIN, Registers, Served
from kvferry.engines.per_peer.thread import Attaching, PeerThread, Writing
from kvferry.engines.per_peer.tickets import Tickets
from kvferry.engines.rows import why_not
from kvferry.engines.seam import MAX_BLOB_BYTES, Caps, Done, Outcome, Region, Ticket
from kvferry.errors import EngineError, WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import Batch, Limits

CLOSE_S = 2.0
"""How long `close` waits for the peers' threads."""

One = TypeVar("One", bound=Registers)
Said = TypeVar("Said")


class PeerEngine(ABC, Generic[One, Said]):
    """All of the seam's calls but `open`, which ends with `_start`, `info` and `tryout`.

    Attributes:
        name, caps, limits: as the seam has them.
    """

    name: str
    caps: Caps
    limits: Limits

    def __init__(self) -> None:
        self._tickets = Tickets()
        self._sources = Intervals.none()
        self._regions: tuple[Region, ...] = ()
        self._peers: dict[PeerId, PeerThread[Said]] = {}
        self._leaving: list[PeerThread[Said]] = []
        self._served: Served[One, Said] | None = None

    # -- what is the library's own

    @abstractmethod
    def _check(self, regions: Sequence[Region]) -> None:
        """Refuse, by number, what is no memory that the library moves. Raises EngineError."""

    @abstractmethod
    def _encoded(self, said: Said) -> bytes:
        """A blob, packed."""

    @abstractmethod
    def _decoded(self, raw: bytes, peer: PeerId) -> Said:
        """A peer's blob; raises WireError where it is none of this peer's."""

    @abstractmethod
    def _new_peer(self, name: PeerId, before: PeerThread[Said] | None) -> PeerThread[Said]:
        """What writes to a peer; `before` is one for the same peer that has not ended yet."""

    @abstractmethod
    def _attach_s(self) -> float:
        """How long attaching may take, in seconds."""

    def _look(self, now: float) -> Iterable[Done]:  # noqa: ARG002 - optional
        """Done again and again on the engine's thread; gives what has become quiet."""
        return ()

    def _look_every_s(self) -> float:
        return 1.0

    def _threads_ended(self) -> None:
        """When the peers' threads have ended, or were waited for long enough."""

    # -- the seam

    def register(self, regions: Sequence[Region]) -> None:
        """Replace the memory that batches are read from and that peers may write to.

        Raises:
            EngineError: a region, which it names, can't be registered.
        """
        served = self._opened()
        self._check(regions)
        self._sources, self._regions = Intervals.none(), ()
        wanted = tuple(region for region in regions if region.nbytes)
        served.register(wanted)
        self._regions = wanted  # each peer's thread registers them with its own instance before its next batch
        starts = np.array([region.address for region in wanted], np.uint64)
        self._sources = Intervals.merged(starts, starts + np.array([region.nbytes for region in wanted], np.uint64))

    def describe(self) -> bytes:
        """The blob that peers hand to `attach`; those who were given the same can only be shut out together.

        Raises:
            EngineError: it has more than 64 KiB: too many regions are registered.
        """
        said = self._encoded(self._opened().blob(MAIN))
        if len(said) > MAX_BLOB_BYTES:
            raise EngineError(
                f"{len(self._regions)} regions take {len(said)} bytes to describe, more than {MAX_BLOB_BYTES}",
                hint="allocate the KV cache in fewer pieces",
            )
        return said

    def personal(self, blob: bytes, epoch: int) -> bytes:
        """What a blob of `describe` becomes for the peer of one connection: an instance of its own; any thread."""
        return self._encoded(self._opened().blob(epoch)) if epoch != MAIN else blob

    def attach(self, peer: PeerId, blob: bytes) -> Ticket:
        """Begin to connect; LANDED when the peer was found to be there, else FAILED_QUIET and why."""
        self._opened()
        try:
            said = self._decoded(blob, peer)
        except WireError as error:
            self.detach(peer)
            ticket = self._tickets.new()
            self._tickets.refuse(ticket, f"peer {peer}: {error}", "blob")
            return ticket
        ticket, until = self._tickets.attaching(self._attach_s())
        if peer not in self._peers:
            before = next((each for each in self._leaving if each.name == peer and each.alive), None)
            self._peers[peer] = self._new_peer(peer, before)
            self._peers[peer].start()
        self._peers[peer].post(Attaching(ticket, said, until))
        return ticket

    def submit(self, peer: PeerId, batch: Batch) -> Ticket:
        """Hand a batch to the peer's thread, which writes one after the other."""
        self._opened()
        ticket, attached = self._tickets.new(), self._peers.get(peer)
        why = why_not(batch, self._sources, self.limits)
        if not why and attached is None:
            why = f"peer {peer} was never attached, or is detached"
        if why or attached is None:
            self._tickets.refuse(ticket, why, "refused")
        else:
            attached.post(Writing(ticket, batch))
        return ticket

    def poll(self, budget_s: float) -> list[Done]:
        """Collect outcomes, waiting up to budget_s while none is there; 0 never waits."""
        self._opened()
        return self._tickets.collect(budget_s, self._look, self._look_every_s())

    def fence(self, peer: PeerId, claim: int | None = None) -> Ticket:  # noqa: ARG002 - a peer is shut out as a whole
        """End what the peer writes to, and refuse later attachments; LANDED at once.

        FAILED_QUIET, which proves nothing, where no peer can be shut out, or where it shares an instance with others.
        """
        ticket = self._tickets.new()
        why = self._opened().shut_out(peer.epoch)
        if why:
            self._tickets.refuse(ticket, why, "no fence")
        else:
            self._tickets.report(Done(ticket, Outcome.LANDED))
        return ticket

    def detach(self, peer: PeerId) -> None:
        """Forget a peer; its queued batches are refused, the one that is being written still ends by itself."""
        served = self._opened()
        gone = self._peers.pop(peer, None)
        if gone is not None:
            gone.leave()
            self._leaving.append(gone)
        self._leaving = [each for each in self._leaving if each.alive]
        served.forget(peer.epoch)

    def close(self) -> None:
        """Stop; ends threads, waiting for 2 s, and instances. May be called twice; does nothing in a forked child."""
        if self._served is None or not self._owner.is_here:
            return
        for peer in list(self._peers):
            self.detach(peer)
        until = time.monotonic() + CLOSE_S
        for each in self._leaving:
            each.relieve()
        for each in self._leaving:
            each.join(max(0.0, until - time.monotonic()))
        self._threads_ended()
        self._served.close()
        self._served = None

    # -- for `open` and `info`

    def _check_closed(self) -> None:
        """Raises EngineError if it is open."""
        if self._served is not None:
            hint = f"make a new one with find.load('{self.name}')"
            raise EngineError(f"the {self.name} engine is open already", hint=hint)

    def _start(self, served: Served[One, Said]) -> None:
        """It is open from now on."""
        self._owner = Owner(self.name)
        self._served = served

    def _opened(self) -> Served[One, Said]:
        if self._served is None:
            raise not_open(self.name)
        self._owner.check()
        return self._served

    def _described_peers(self) -> dict[str, object]:
        """What `info` says of peers."""
        served, threads = self._opened(), [*self._peers.values(), *self._leaving]
        return {
            "peers": {str(name): each.where for name, each in list(self._peers.items())},
            "served": len(served),
            "rebuilds": served.rebuilds + sum(each.rebuilds for each in threads),
        }
