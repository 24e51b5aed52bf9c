"""The embedded engine: memory written directly where two processes share a host and a user, TCP elsewhere."""

from __future__ import annotations

import contextlib
import itertools
import resource
import secrets
import selectors
import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.engines.findings import Finding
from kvferry.engines.host import host_identity
from kvferry.engines.intervals import Intervals
from kvferry.engines.local.blob import TOKEN_BYTES, VERSION, Blob, decode, encode
from kvferry.engines.local.copier import Copier
from kvferry.engines.local.frames import key_of
from kvferry.engines.local.lanes import Lanes
from kvferry.engines.local.link import State
from kvferry.engines.local.memory_link import MemoryLink
from kvferry.engines.local.options import parse
from kvferry.engines.local.pick import Attachment, Tries
from kvferry.engines.local.shared_link import SharedLink
from kvferry.engines.local.syscalls import error_name
from kvferry.engines.local.target import Target
from kvferry.engines.local.tcp_link import TcpLink
from kvferry.engines.local.waker import Waker
from kvferry.engines.owner import Owner, not_open
from kvferry.engines.rows import why_not
from kvferry.engines.seam import Caps, Done, EngineConfig, Outcome, Region, Ticket
from kvferry.errors import EngineError, EngineUnavailable, KvferryError, WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import Batch, Limits

_OPENING_POLL_S = 0.05
_STEP_EVERY_S = 0.001


class LocalEngine:
    """Moves batches between processes without any other library.

    Option `mechanism`: "shm" (shared memory: the target's pools are memfds, see `kvferry.allocate_pool`), "cma"
    (cross-memory attach), "tcp", or "auto": the first of these, in this order, that works with the peer (ADR 0008).
    Option `tcp_connections`: the most TCP connections to one peer, and the threads that send and receive large batches,
    1 to 16. Option `copy_threads`: threads that copy a large batch by cross-memory attach, 1 to 16; 2 where there are
    processors.

    Capabilities, after `open`: FENCE always. GRANTS if TCP may be used: what comes by TCP a thread of the target
    receives, and it checks each row first. By shared memory and by cross-memory attach the writer's process writes:
    it is trusted with the memory, and a fence waits until it has ended or its engine has detached. BLOCKING unless
    "tcp": a copy is done inside `submit`. Only "tcp" (GRANTS without BLOCKING) checks every row of every peer.
    """

    name = "local"
    limits = Limits(rows=16384, bytes=16 << 20)

    def __init__(self) -> None:
        self._mechanism = "auto"
        self.caps = _caps_of(self._mechanism)
        self._tickets = itertools.count(1)
        self._sources = Intervals.none()
        self._attachments: dict[PeerId, Attachment] = {}
        self._opening: dict[PeerId, Attachment] = {}
        self._attach_tickets: dict[Ticket, PeerId] = {}
        self._unknown: dict[PeerId, list[Ticket]] = {}
        self._fences: dict[Ticket, tuple[PeerId, int | None]] = {}
        self._done: list[Done] = []
        self._target: Target | None = None
        self._owner = Owner(self.name)
        self._stepped_at = 0.0

    def open(self, config: EngineConfig) -> None:
        """Start to listen.

        Raises:
            ConfigError: an option is unknown or has a value that isn't.
            AddressError: no port of config.data_ports can be bound.
            EngineUnavailable: this is not Linux.
            EngineError: the engine is open already, or this process has no descriptor left for it.
        """
        if self._target is not None:
            raise EngineError("the local engine is open already", hint="make a new one with find.load('local')")
        if not sys.platform.startswith("linux"):
            raise EngineUnavailable(f"the local engine needs Linux, this is {sys.platform}")
        self._mechanism, self._connections, copy_threads = parse(config.options)
        self._copier = Copier(copy_threads)
        self._sending = Lanes("kvferry-local-send", self._connections)
        self.caps = _caps_of(self._mechanism)
        self._me = config.me
        self._owner = Owner(self.name)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._advertise_host = config.advertise_host
        try:
            self._start(config)
        except OSError as error:
            if isinstance(error, KvferryError):
                raise
            raise EngineError(
                f"the local engine can't be opened: {error_name(error)} ({error.strerror}); this process may have "
                f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open",
                hint="raise that limit (ulimit -n)",
            ) from error

    def _start(self, config: EngineConfig) -> None:
        with contextlib.ExitStack() as undo:
            self._waker = Waker()
            undo.callback(self._waker.close)
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._selector.register(self._waker.fileno(), selectors.EVENT_READ, None)
            self._target = Target(config, self._mechanism, self._token, self.limits, self._connections, self._changed)
            undo.pop_all()

    def register(self, regions: Sequence[Region]) -> None:
        """Replace the memory that batches are read from, and that peers may map if all of it lies in memfd pools.

        Raises:
            EngineError: a region, which it names, can't be registered.
        """
        for number, region in enumerate(regions):
            if region.device >= 0:
                raise EngineError(f"region {number} lies on device {region.device}; the local engine moves host memory")
            if region.address < 0 or region.nbytes < 0 or region.address + region.nbytes >= 1 << 64:
                raise EngineError(f"region {number}, {region.nbytes} bytes at {region.address:#x}, is no memory")
        starts = np.array([region.address for region in regions], np.uint64)
        ends = np.array([region.address + region.nbytes for region in regions], np.uint64)
        self._sources = Intervals.merged(starts, ends)
        if self._target is not None:
            self._target.shares.replace(regions)

    def describe(self) -> bytes:
        """The blob that peers hand to `attach`; it holds a secret token: for authenticated peers only."""
        target = self._opened()
        door, page = target.memory_door, target.page
        by_cma = door is not None and "cma" in door.offers
        return encode(
            Blob(
                version=VERSION,
                token=self._token,
                host=host_identity() if door else "",
                unix=door.name if door else "",
                why_not_shared=target.why_not_shared,
                nonce_address=page.address if by_cma else 0,
                nonce_digest=page.digest if by_cma else b"",
                tcp_host=self._advertise_host if target.port else "",
                tcp_port=target.port,
            )
        )

    def personal(self, blob: bytes, epoch: int) -> bytes:
        """What a blob of `describe` becomes for the peer of one connection: with a token of its own; any thread."""
        said = decode(blob)
        return encode(msgspec.structs.replace(said, token=key_of(said.token, epoch)))

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
        attachment = self._attachments[peer] = self._opening[peer] = Attachment(peer, ticket, tries, self._selector)
        attachment.step()
        self._collect(peer, attachment)
        return ticket

    def submit(self, peer: PeerId, batch: Batch) -> Ticket:
        """Begin to write a batch; unless it goes by TCP it is written when this returns."""
        self._opened()
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
            # a copy that was made inside submit is not held up by a look at the sockets each time
            if not self._done or until - budget_s - self._stepped_at > _STEP_EVERY_S:
                self._step(wait_s)
                self._stepped_at = time.monotonic()
            left_s = until - time.monotonic()
            if self._done or left_s <= 0:
                done, self._done = self._done, []
                return done
            wait_s = min(left_s, _OPENING_POLL_S) if self._opening else left_s

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
        target = self._opened()
        self._drop_attachment(peer)
        target.detach(peer)

    def close(self) -> None:
        """Stop; ends threads and sockets. May be called twice; does nothing in a forked child."""
        if self._target is None or not self._owner.is_here:
            return
        for peer in list(self._attachments):
            self._drop_attachment(peer)
        self._sending.stop()
        self._target.close()
        self._target = None
        self._copier.close()
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
            "shared_memory": target.why_not_shared or "offered",
            "garbage": target.garbage,
            "fences_waiting": len(self._fences),
        }

    def tryout(self) -> list[Finding]:
        """Try each mechanism between two processes of this host, and read what limits them."""
        from kvferry.engines.local.tryout import tryout

        return tryout()

    def _opened(self) -> Target:
        if self._target is None:
            raise not_open(self.name)
        # a child has the sockets and the epoll descriptor, but no thread: what it does there its parent's peers see
        self._owner.check()
        return self._target

    def _tries(self, peer: PeerId, blob: Blob) -> Tries:
        me = PeerId(self._me.incarnation, peer.epoch)
        tries: Tries = [
            ("shm", lambda: SharedLink(blob, me)),
            ("cma", lambda: MemoryLink(blob, me, self._copier)),
            ("tcp", lambda: TcpLink(blob, me, self._waker.set, self._connections, self._sending)),
        ]
        return [one for one in tries if self._mechanism in {"auto", one[0]}]

    def _step(self, wait_s: float) -> None:
        ready = self._selector.select(wait_s)
        # cleared before the fences are looked at: a change after that wakes the next wait
        self._waker.clear()
        readable = {key.data for key, _ in ready if key.data is not None}
        for attachment in readable | set(self._opening.values()):
            attachment.step()
            self._collect(attachment.peer, attachment)
        self._check_fences()

    def _changed(self) -> None:
        # in the target's threads; a fence that is asked for meanwhile looks for itself before it waits
        if self._fences:
            self._waker.set()

    def _check_fences(self) -> None:
        for ticket, (peer, claim) in list(self._fences.items()):
            if self._opened().writers.is_quiet(peer, claim):
                del self._fences[ticket]
                self._done.append(Done(ticket, Outcome.LANDED))

    def _collect(self, peer: PeerId, attachment: Attachment) -> None:
        if attachment.state is not State.OPENING and self._opening.get(peer) is attachment:
            del self._opening[peer]
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
        self._opening.pop(peer, None)
        attachment = self._attachments.pop(peer, None)
        if attachment is not None:
            attachment.close()
            self._collect(peer, attachment)


def _caps_of(mechanism: str) -> Caps:
    by_tcp = Caps.GRANTS if mechanism in {"auto", "tcp"} else Caps.NONE
    by_memory = Caps.NONE if mechanism == "tcp" else Caps.BLOCKING
    return Caps.FENCE | Caps.ANY_THREAD | by_tcp | by_memory
