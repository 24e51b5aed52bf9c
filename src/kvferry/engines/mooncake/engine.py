"""The Mooncake engine: an instance of the library for each peer, on the side that writes and on the other."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Sequence

import numpy as np

from kvferry.engines.findings import Finding
from kvferry.engines.intervals import Intervals
from kvferry.engines.mooncake import library
from kvferry.engines.mooncake.blob import decode, encode
from kvferry.engines.mooncake.instance import Place
from kvferry.engines.mooncake.options import Options, parse
from kvferry.engines.mooncake.peer import Attaching, Peer, Unproven, Writing
from kvferry.engines.mooncake.quiet import LIMITS
from kvferry.engines.mooncake.serving import MAIN, Serving
from kvferry.engines.owner import Owner, not_open
from kvferry.engines.rows import why_not
from kvferry.engines.seam import Caps, Done, EngineConfig, Outcome, Region, Ticket
from kvferry.errors import EngineError, WireError
from kvferry.ids import Incarnation, PeerId
from kvferry.plan.batch import Batch

ATTACH_S = 5.0
"""What attaching may take beside one transfer's limit."""

CLOSE_S = 2.0


class MooncakeEngine:
    """Moves batches with Mooncake's transfer engine, and its memory is written to by peers that do so.

    Options: `protocol` ("tcp", "rdma", ...) is handed to the library, which does not heed it: it takes RDMA if it finds
    devices for that and MC_FORCE_TCP is unset, else TCP; `info` says which. `devices`, `gpu`: the network devices it
    may use (see `engines.devices`). `timeout_s`: after how many seconds a transfer is given up, 5 or more; 10
    unless MC_TRANSFER_TIMEOUT says otherwise. It is one setting for the process, as are the range of ports and whether
    addresses are IPv6, which the first engine of the process decides.

    LANDED: the blocking call returned 0, so that the target has acknowledged each row after writing it.
    FAILED_QUIET: only what was refused before the library saw it. All else is FAILED_UNKNOWN: the library goes on
    writing for a while after it has reported a failure. The instance that failed is destroyed at once, and the peer has
    to be attached again. QUIET follows, by TCP only (see `quiet`): as soon as the target is gone or has shut this
    process out, else with that attachment; not as long as the target is stopped.

    A fence shuts the whole peer out at once, whatever claim it is asked for and whether or not its process is stopped:
    each connection is told (`personal`) of an instance of its own, which is destroyed, by RDMA with its queue pairs and
    memory keys. The library listens on all interfaces, whatever `bind_host` is, and whoever reaches its ports may read
    and write all registered memory.
    A call that is blocked can't be ended: `close` waits for 2 s, then leaves that peer's thread, a daemon, to itself;
    the thread ends when the call returns, a minute later at most, and keeps its instance until then.
    """

    name = "mooncake"
    caps = Caps.FENCE
    limits = LIMITS

    def __init__(self) -> None:
        library.check_installed()
        self._tickets = itertools.count(1)
        self._sources = Intervals.none()
        self._regions: tuple[Region, ...] = ()
        self._peers: dict[PeerId, Peer] = {}
        self._leaving: list[Peer] = []
        self._unproven: dict[Incarnation, list[Unproven]] = {}
        self._attaching: dict[Ticket, float] = {}
        self._given_up: set[Ticket] = set()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._serving: Serving | None = None
        self._options = Options()

    def open(self, config: EngineConfig) -> None:
        """Start an instance that peers can write to.

        Raises:
            ConfigError: an option is unknown or has a value that isn't, or the environment has a setting under which
                outcomes would not be true.
            EngineUnavailable: the library can't be imported.
            EngineError: it is open already, or the library can't start.
        """
        if self._serving is not None:
            raise EngineError("the mooncake engine is open already", hint="make a new one with find.load('mooncake')")
        self._options = parse(config.options)
        library.check_environment()
        host = config.advertise_host.strip("[]")
        library.set_environment(self._options.timeout_s, config.data_ports, ipv6=":" in host)
        self._place = Place(host, self._options.protocol, self._options.devices)
        self._owner = Owner(self.name)
        self._serving = Serving(self._place, config.me.incarnation)

    def register(self, regions: Sequence[Region]) -> None:
        """Replace the memory that batches are read from and that peers may write to.

        Raises:
            EngineError: a region, which it names, can't be registered.
        """
        for number, region in enumerate(regions):
            if region.device >= 0:
                raise EngineError(f"region {number} lies on device {region.device}; this engine moves host memory")
            if region.address <= 0 or region.nbytes < 0 or region.address + region.nbytes >= 1 << 64:
                raise EngineError(f"region {number}, {region.nbytes} bytes at {region.address:#x}, is no memory")
        serving = self._opened()
        self._sources, self._regions = Intervals.none(), ()
        wanted = tuple(region for region in regions if region.nbytes)
        serving.register(wanted)
        self._regions = wanted  # each peer's thread registers them with its own instance before its next batch
        starts = np.array([region.address for region in wanted], np.uint64)
        self._sources = Intervals.merged(starts, starts + np.array([region.nbytes for region in wanted], np.uint64))

    def describe(self) -> bytes:
        """The blob that peers hand to `attach`; those who were given the same can only be shut out together."""
        return encode(self._opened().blob(MAIN))

    def personal(self, blob: bytes, epoch: int) -> bytes:
        """What a blob of `describe` becomes for the peer of one connection: an instance of its own; any thread."""
        return encode(self._opened().blob(epoch)) if epoch != MAIN else blob

    def attach(self, peer: PeerId, blob: bytes) -> Ticket:
        """Begin to connect; LANDED when the peer's process has answered with its own nonce, else FAILED_QUIET."""
        self._opened()
        ticket = next(self._tickets)
        try:
            said = decode(blob)
            why = "" if said.incarnation == peer.incarnation else f"the blob is of process {said.incarnation:016x}"
        except WireError as error:
            why = str(error)
        if why:
            self.detach(peer)
            self._done.put(Done(ticket, Outcome.FAILED_QUIET, f"peer {peer}: {why}", "blob"))
            return ticket
        until = self._attaching[ticket] = time.monotonic() + self._options.timeout_s + ATTACH_S
        if peer not in self._peers:
            self._peers[peer] = self._new(peer)
        self._peers[peer].post(Attaching(ticket, said, until))
        return ticket

    def submit(self, peer: PeerId, batch: Batch) -> Ticket:
        """Hand a batch to the peer's thread, which writes one after the other."""
        self._opened()
        ticket = next(self._tickets)
        attached = self._peers.get(peer)
        why = why_not(batch, self._sources, self.limits)
        if not why and attached is None:
            why = f"peer {peer} was never attached, or is detached"
        if why or attached is None:
            self._done.put(Done(ticket, Outcome.FAILED_QUIET, why, "refused"))
        else:
            attached.post(Writing(ticket, batch))
        return ticket

    def poll(self, budget_s: float) -> list[Done]:
        """Collect outcomes, waiting up to budget_s while none is there; 0 never waits."""
        self._opened()
        until = time.monotonic() + budget_s
        while True:
            done = self._overdue() + self._collected()
            wait_s = min([until, *self._attaching.values()]) - time.monotonic()
            if done or until <= time.monotonic():
                return done
            with contextlib.suppress(queue.Empty):
                self._keep(self._done.get(timeout=max(wait_s, 0.0)), done)
                return done + self._collected()

    def fence(self, peer: PeerId, claim: int | None = None) -> Ticket:  # noqa: ARG002 - a peer is shut out as a whole
        """Destroy what the peer writes to, and refuse later attachments; LANDED at once.

        FAILED_QUIET, which proves nothing, where the peer shares an instance with others.
        """
        ticket = next(self._tickets)
        why = self._opened().shut_out(peer.epoch)
        outcome = Outcome.FAILED_QUIET if why else Outcome.LANDED
        self._done.put(Done(ticket, outcome, why, "no fence" if why else ""))
        return ticket

    def detach(self, peer: PeerId) -> None:
        """Forget a peer; its queued batches are refused, the one that is being written still ends by itself."""
        self._opened()
        gone = self._peers.pop(peer, None)
        if gone is not None:
            gone.leave()
            self._leaving.append(gone)
        self._leaving = [each for each in self._leaving if each.alive]
        self._opened().forget(peer.epoch)

    def close(self) -> None:
        """Stop; ends threads, waiting for 2 s, and instances. May be called twice; does nothing in a forked child."""
        if self._serving is None or not self._owner.is_here:
            return
        for peer in list(self._peers):
            self.detach(peer)
        until = time.monotonic() + CLOSE_S
        for each in self._leaving:
            each.relieve()
        for each in self._leaving:
            each.join(max(0.0, until - time.monotonic()))
        self._serving.close()
        self._serving = None

    def info(self) -> dict[str, object]:
        """For people: library, transport in use and how that is known, session, peers, instances given up."""
        serving = self._opened().main
        return {
            "library": library.version(),
            "transport": serving.transport,
            "protocol_asked_for": self._options.protocol,
            "network_devices": serving.network_devices,
            "session": serving.session,
            "timeout_s": self._options.timeout_s,
            "peers": {str(name): _where(each) for name, each in self._peers.items()},
            "served": len(self._opened()),
            "rebuilds": sum(each.rebuilds for each in [*self._peers.values(), *self._leaving]),
            "unproven": sum(map(len, self._unproven.values())),
        }

    def tryout(self) -> list[Finding]:
        """What is installed, and whether two processes of this host can transfer."""
        from kvferry.engines.mooncake.tryout import tryout

        return tryout()

    def _opened(self) -> Serving:
        if self._serving is None:
            raise not_open(self.name)
        self._owner.check()
        return self._serving

    def _new(self, name: PeerId) -> Peer:
        before = next((each for each in self._leaving if each.name == name and each.alive), None)
        unproven = self._unproven.setdefault(name.incarnation, [])
        return Peer(name, self._place, lambda: self._regions, self._done.put, unproven, before)

    def _collected(self) -> list[Done]:
        done: list[Done] = []
        with contextlib.suppress(queue.Empty):
            while True:
                self._keep(self._done.get_nowait(), done)
        return done

    def _keep(self, one: Done, done: list[Done]) -> None:
        if one.ticket in self._given_up:
            self._given_up.discard(one.ticket)
        else:
            self._attaching.pop(one.ticket, None)
            done.append(one)

    def _overdue(self) -> list[Done]:
        """Attachments that are waited for no more; a stopped peer is not known by anything else."""
        now = time.monotonic()
        late = [ticket for ticket, until in self._attaching.items() if until < now]
        for ticket in late:
            del self._attaching[ticket]
            self._given_up.add(ticket)
        seconds = self._options.timeout_s + ATTACH_S
        return [Done(one, Outcome.FAILED_QUIET, f"no answer within {seconds:g} s", "deadline") for one in late]


def _where(peer: Peer) -> str:
    return peer.target.session if peer.target is not None else "not attached"
