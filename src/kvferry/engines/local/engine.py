"""The embedded engine: cross-memory attach where two processes share a host and a user, TCP elsewhere."""

from __future__ import annotations

import itertools
import secrets
import selectors
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.engines.intervals import Intervals
from kvferry.engines.local.blob import TOKEN_BYTES, VERSION, Blob, decode, encode, host_identity
from kvferry.engines.local.link import Link, State
from kvferry.engines.local.memory_link import MemoryLink
from kvferry.engines.local.pick import Attachment
from kvferry.engines.local.rows import why_not
from kvferry.engines.local.target import Target
from kvferry.engines.local.tcp_link import TcpLink
from kvferry.engines.local.waker import Waker
from kvferry.engines.seam import Caps, Done, EngineConfig, Outcome, Region, Ticket
from kvferry.errors import ConfigError, EngineError, EngineUnavailable, WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import Batch, Limits

MECHANISMS = ("auto", "cma", "tcp")
_OPENING_POLL_S = 0.05


class LocalEngine:
    """Moves batches between processes without any other library.

    Option `mechanism`: "auto" (cross-memory attach, TCP where that is refused), "cma" or "tcp" alone.

    Capabilities, after `open`: FENCE always. GRANTS unless "cma": what comes by TCP a thread of the target
    receives, and it checks each row first. By cross-memory attach the writer's process writes: it is trusted
    with the whole memory, and a fence waits until it has ended or its engine has detached. BLOCKING unless
    "tcp": a copy is done inside `submit`. Only "tcp" (GRANTS without BLOCKING) checks every row of every peer.
    """

    name = "local"
    limits = Limits(rows=16384, bytes=8 << 20)

    def __init__(self) -> None:
        self.caps = Caps.FENCE | Caps.BLOCKING
        self._mechanism = "auto"
        self._tickets = itertools.count(1)
        self._sources = Intervals.none()
        self._attachments: dict[PeerId, Attachment] = {}
        self._attach_tickets: dict[Ticket, PeerId] = {}
        self._unknown: dict[PeerId, list[Ticket]] = {}
        self._fences: dict[Ticket, tuple[PeerId, int | None]] = {}
        self._done: list[Done] = []
        self._target: Target | None = None

    def open(self, config: EngineConfig) -> None:
        """Start to listen.

        Raises:
            ConfigError: an option is unknown or has a value that isn't.
            AddressError: no port of config.data_ports can be bound.
            EngineUnavailable: this is not Linux.
            EngineError: the engine is open already.
        """
        if self._target is not None:
            raise EngineError("the local engine is open already", hint="make a new one with find.load('local')")
        if not sys.platform.startswith("linux"):
            raise EngineUnavailable(f"the local engine needs Linux, this is {sys.platform}")
        self._mechanism = _mechanism_of(config.options)
        self.caps = Caps.FENCE | (Caps.NONE if self._mechanism == "cma" else Caps.GRANTS)
        self.caps |= Caps.NONE if self._mechanism == "tcp" else Caps.BLOCKING
        self._me = config.me
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._advertise_host = config.advertise_host
        self._waker = Waker()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waker.fileno(), selectors.EVENT_READ, None)
        try:
            self._target = Target(config, self._mechanism, self._token, self.limits, self._waker.set)
        except BaseException:
            self._selector.close()
            self._waker.close()
            raise

    def register(self, regions: Sequence[Region]) -> None:
        """Replace the memory that batches are read from; raises EngineError naming a region that can't be."""
        for number, region in enumerate(regions):
            if region.device >= 0:
                raise EngineError(f"region {number} lies on device {region.device}; the local engine moves host memory")
            if region.address < 0 or region.nbytes < 0 or region.address + region.nbytes >= 1 << 64:
                raise EngineError(f"region {number}, {region.nbytes} bytes at {region.address:#x}, is no memory")
        starts = np.array([region.address for region in regions], np.uint64)
        ends = np.array([region.address + region.nbytes for region in regions], np.uint64)
        self._sources = Intervals.merged(starts, ends)

    def describe(self) -> bytes:
        """The blob that peers hand to `attach`; it holds a secret token: for authenticated peers only."""
        target = self._opened()
        door, page = target.memory_door, target.page
        return encode(
            Blob(
                version=VERSION,
                token=self._token,
                host=host_identity() if door else "",
                unix=door.name if door else "",
                nonce_address=page.address if door else 0,
                nonce_digest=page.digest if door else b"",
                tcp_host=self._advertise_host if target.port else "",
                tcp_port=target.port,
            )
        )

    def attach(self, peer: PeerId, blob: bytes) -> Ticket:
        """Begin to connect; LANDED when the peer can be written to, else FAILED_QUIET with the reasons."""
        self._opened()
        self._drop_attachment(peer)
        ticket = next(self._tickets)
        try:
            tries = self._tries(peer, decode(blob))
        except WireError as error:
            self._done.append(Done(ticket, Outcome.FAILED_QUIET, str(error), "blob"))
            return ticket
        self._attach_tickets[ticket] = peer
        attachment = self._attachments[peer] = Attachment(ticket, tries, self._selector)
        attachment.step()
        self._collect(peer, attachment)
        return ticket

    def submit(self, peer: PeerId, batch: Batch) -> Ticket:
        """Begin to write a batch; with cross-memory attach it is written when this returns."""
        ticket = next(self._tickets)
        attachment = self._attachments.get(peer)
        reason = why_not(batch, self._sources, self.limits)
        if not reason and attachment is None:
            reason = f"peer {peer} was never attached, or is detached"
        if reason or attachment is None:
            self._done.append(Done(ticket, Outcome.FAILED_QUIET, reason, "refused"))
        elif attachment.state is State.READY and not len(batch):
            self._done.append(Done(ticket, Outcome.LANDED))
        else:
            attachment.submit(ticket, batch)
            self._collect(peer, attachment)
        return ticket

    def poll(self, budget_s: float) -> list[Done]:
        """Collect outcomes, waiting up to budget_s while none is there; 0 never waits."""
        self._opened()
        until = time.monotonic() + budget_s
        wait_s = 0.0
        while True:
            self._step(wait_s)
            left_s = until - time.monotonic()
            if self._done or left_s <= 0:
                done, self._done = self._done, []
                return done
            wait_s = min(left_s, _OPENING_POLL_S) if self._has_opening() else left_s

    def fence(self, peer: PeerId, claim: int | None = None) -> Ticket:
        """Drop the grant, refuse later attachments of the peer, wait for proof that nothing more can land.

        Rows that are being received for the claim are cut, so a peer on TCP is quiet at once even when it
        is stopped. A peer that is attached by memory is quiet when its process has ended or its engine has
        detached.
        """
        self._opened().writers.fence(peer, claim)
        ticket = next(self._tickets)
        self._fences[ticket] = (peer, claim)
        return ticket

    def detach(self, peer: PeerId) -> None:
        """Forget a peer in both directions; it is told to stop, and on record until that is proven."""
        self._drop_attachment(peer)
        self._opened().detach(peer)

    def close(self) -> None:
        """Stop; ends threads and sockets. May be called twice."""
        if self._target is None:
            return
        for peer in list(self._attachments):
            self._drop_attachment(peer)
        self._target.close()
        self._target = None
        self._selector.close()
        self._waker.close()

    def explain(self, peer: PeerId) -> str:
        """How a peer is written to, and why not in another way, in words."""
        attachment = self._attachments.get(peer)
        return attachment.explain() if attachment is not None else "not attached"

    def info(self) -> dict[str, object]:
        """For people: the mechanism per peer with the reason, who can write here, what was turned away."""
        target = self._opened()
        return {
            "mechanism": self._mechanism,
            "tcp_port": target.port,
            "peers": {str(peer): attachment.explain() for peer, attachment in self._attachments.items()},
            "writers": target.writers.mechanisms(),
            "garbage": target.garbage,
            "fences_waiting": len(self._fences),
        }

    def _opened(self) -> Target:
        if self._target is None:
            raise EngineError("the local engine is not open", hint="call open() first, and nothing after close()")
        return self._target

    def _tries(self, peer: PeerId, blob: Blob) -> list[Callable[[], Link]]:
        me = PeerId(self._me.incarnation, peer.epoch)
        tries: list[Callable[[], Link]] = []
        if self._mechanism in {"auto", "cma"}:
            tries.append(lambda: MemoryLink(blob, me))
        if self._mechanism in {"auto", "tcp"}:
            tries.append(lambda: TcpLink(blob, me, self._waker.set))
        return tries

    def _step(self, wait_s: float) -> None:
        ready = self._selector.select(wait_s)
        # cleared before the fences are looked at: a change after that wakes the next wait
        self._waker.clear()
        readable = {id(key.data) for key, _ in ready}
        for peer, attachment in list(self._attachments.items()):
            if attachment.state is State.OPENING or id(attachment) in readable:
                attachment.step()
                self._collect(peer, attachment)
        self._check_fences()

    def _has_opening(self) -> bool:
        return any(attachment.state is State.OPENING for attachment in self._attachments.values())

    def _check_fences(self) -> None:
        for ticket, (peer, claim) in list(self._fences.items()):
            if self._opened().writers.is_quiet(peer, claim):
                del self._fences[ticket]
                self._done.append(Done(ticket, Outcome.LANDED))

    def _collect(self, peer: PeerId, attachment: Attachment) -> None:
        for done in attachment.done:
            self._done.append(done)
            if done.outcome is Outcome.FAILED_UNKNOWN:
                self._unknown.setdefault(peer, []).append(done.ticket)
            if self._attach_tickets.pop(done.ticket, None) and attachment.connected_by("tcp"):
                # the target ends a peer's older connections before it greets a new one
                quiet = self._unknown.pop(peer, [])
                self._done += [Done(ticket, Outcome.QUIET) for ticket in quiet]
        attachment.done.clear()

    def _drop_attachment(self, peer: PeerId) -> None:
        attachment = self._attachments.pop(peer, None)
        if attachment is not None:
            attachment.close()
            self._collect(peer, attachment)


def _mechanism_of(options: dict[str, str]) -> str:
    unknown = sorted(set(options) - {"mechanism"})
    if unknown:
        raise ConfigError(f"the local engine has no option {unknown[0]!r}", hint="its only option is 'mechanism'")
    mechanism = options.get("mechanism", "auto")
    if mechanism not in MECHANISMS:
        raise ConfigError(
            f"option 'mechanism' of the local engine is {mechanism!r}", hint=f"one of {', '.join(MECHANISMS)}"
        )
    return mechanism
