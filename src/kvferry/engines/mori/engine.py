"""The MORI engine: an engine of the library for each peer, on the side that writes and, by RDMA, on the other."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import time
from collections.abc import Sequence

import numpy as np

from kvferry.engines.findings import Finding
from kvferry.engines.intervals import Intervals
from kvferry.engines.mori import library, precautions
from kvferry.engines.mori.blob import decode, encode
from kvferry.engines.mori.instance import Place
from kvferry.engines.mori.limbo import LOOK_EVERY_S, Limbo
from kvferry.engines.mori.options import Options, parse
from kvferry.engines.mori.peer import Attaching, Peer, Writing
from kvferry.engines.mori.serving import MAIN, Serving
from kvferry.engines.owner import Owner, not_open
from kvferry.engines.rows import why_not
from kvferry.engines.seam import MAX_BLOB_BYTES, Caps, Done, EngineConfig, Outcome, Region, Ticket
from kvferry.errors import EngineError, EngineUnavailable, WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import Batch, Limits

CLOSE_S = 2.0


class MoriEngine:
    """Moves batches with MORI-IO: by RDMA between hosts, or by XGMI between GPUs of one host.

    Options: `backend` ("auto": RDMA where there is an active device, else XGMI; "rdma"; "xgmi"). `devices`, `gpu`: the
    network devices it may use (see `engines.devices`), which become MORI_RDMA_DEVICES. `qp_retry_count`,
    `poll_cq_mode`, `qp_per_transfer`: MORI's variables of the environment say them, too; they hold for the process.
    `attach_timeout_s` and `transfer_timeout_s` are the engine's own deadlines.

    Capabilities, after `open`: FENCE by RDMA, and DEVICE_MEMORY by XGMI, which moves nothing else; by RDMA where HIP
    finds a device (not run). No GRANTS: who is attached is trusted with all registered memory.

    LANDED: the library says SUCCESS, and the target's process, where it can be seen, had not ended then: by XGMI the
    library does not notice that. FAILED_QUIET: what was refused here, or by the library before it began.
    FAILED_UNKNOWN: all else, and what was not over in time. QUIET follows when such a batch is done after all, or when
    its target, a process of this host, has ended. A peer that failed in that way has to be attached anew, with a new
    engine of the library; so has one of which the library says that it, or a port, is lost.

    By RDMA a fence shuts the whole peer out at once, whatever claim it is asked for and whether or not its process is
    stopped: each connection is told (`personal`) of an engine of its own, which is destroyed.
    """

    name = "mori"
    limits = Limits(rows=1024, bytes=16 << 20)

    def __init__(self) -> None:
        """Raises EngineUnavailable when the library can't be imported; it is imported by `open`."""
        library.check_installed()
        self.caps = Caps.NONE
        self._tickets = itertools.count(1)
        self._sources = Intervals.none()
        self._regions: tuple[Region, ...] = ()
        self._peers: dict[PeerId, Peer] = {}
        self._leaving: list[Peer] = []
        self._attaching: dict[Ticket, float] = {}
        self._given_up: set[Ticket] = set()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._limbo = Limbo()
        self._serving: Serving | None = None

    def open(self, config: EngineConfig) -> None:
        """Start an engine of the library that peers can write to.

        Raises:
            ConfigError: an option is unknown or has a value that isn't, or the environment has a setting under which
                outcomes would not be true.
            EngineUnavailable: the library can't be imported, or finds no device; by RDMA a child process has tried.
            EngineError: it is open already, or can't listen at the address.
        """
        if self._serving is not None:
            raise EngineError("the mori engine is open already", hint="make a new one with find.load('mori')")
        self._options: Options = parse(config.options)
        library.check_environment()
        library.set_environment(self._options)
        cpp = library.load()
        backend = _backend(self._options.backend)
        if backend == "rdma":
            precautions.bindable(config.bind_host, config.data_ports)
            precautions.try_backend(backend, config.bind_host)
        self._place = Place(cpp, backend, config.bind_host, config.advertise_host, config.data_ports)
        self._owner = Owner(self.name)
        self._serving = Serving(self._place, config.me.incarnation)
        self.caps = Caps.DEVICE_MEMORY if library.gpu_count() else Caps.NONE
        if self._serving.can_shut_out:
            self.caps |= Caps.FENCE

    def register(self, regions: Sequence[Region]) -> None:
        """Replace the memory that batches are read from and that peers may write to.

        Raises:
            EngineError: a region, which it names, can't be registered.
        """
        serving = self._opened()
        for number, region in enumerate(regions):
            self._check(number, region)
        self._sources, self._regions = Intervals.none(), ()
        wanted = tuple(region for region in regions if region.nbytes)
        if self._place.backend == "rdma":
            precautions.check_host_memory(wanted)
        serving.register(wanted)
        self._regions = wanted  # each peer's thread registers them with its own instance before its next batch
        starts = np.array([region.address for region in wanted], np.uint64)
        self._sources = Intervals.merged(starts, starts + np.array([region.nbytes for region in wanted], np.uint64))

    def describe(self) -> bytes:
        """The blob that peers hand to `attach`; those who were given the same can only be shut out together.

        Raises:
            EngineError: it has more than 64 KiB: too many regions are registered.
        """
        said = encode(self._opened().blob(MAIN))
        if len(said) > MAX_BLOB_BYTES:
            raise EngineError(
                f"{len(self._regions)} regions take {len(said)} bytes to describe, more than {MAX_BLOB_BYTES}",
                hint="allocate the KV cache in fewer pieces",
            )
        return said

    def personal(self, blob: bytes, epoch: int) -> bytes:
        """What a blob of `describe` becomes for the peer of one connection: an engine of its own; any thread."""
        return encode(self._opened().blob(epoch)) if epoch != MAIN else blob

    def attach(self, peer: PeerId, blob: bytes) -> Ticket:
        """Begin to connect; LANDED when the peer was found to be there, else FAILED_QUIET and why."""
        self._opened()
        ticket = next(self._tickets)
        try:
            said = decode(blob, peer, self._place.backend)
        except WireError as error:
            self.detach(peer)
            self._done.put(Done(ticket, Outcome.FAILED_QUIET, str(error), "blob"))
            return ticket
        until = self._attaching[ticket] = time.monotonic() + self._options.attach_timeout_s
        if peer not in self._peers:
            self._peers[peer] = Peer(
                peer, self._place, lambda: self._regions, self._done.put, self._limbo, self._options.transfer_timeout_s
            )
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
        serving = self._opened()
        until = time.monotonic() + budget_s
        while True:
            now = time.monotonic()
            serving.step(now)
            # what is quiet was reported before: it is in the queue by now
            quiet = self._limbo.news(now)
            done = self._overdue(now) + self._collected() + quiet
            if done or until <= now:
                return done
            wait_s = min([until, *self._attaching.values()]) - now
            if len(self._limbo):
                wait_s = min(wait_s, LOOK_EVERY_S)
            with contextlib.suppress(queue.Empty):
                self._keep(self._done.get(timeout=max(wait_s, 0.0)), done)
                return done + self._collected()

    def fence(self, peer: PeerId, claim: int | None = None) -> Ticket:  # noqa: ARG002 - a peer is shut out as a whole
        """By RDMA destroy what the peer writes to, and refuse later attachments; LANDED at once.

        FAILED_QUIET, which proves nothing, by XGMI, and where the peer shares an engine of the library with others.
        """
        ticket = next(self._tickets)
        why = self._opened().shut_out(peer.epoch)
        outcome = Outcome.FAILED_QUIET if why else Outcome.LANDED
        self._done.put(Done(ticket, outcome, why, "no fence" if why else ""))
        return ticket

    def detach(self, peer: PeerId) -> None:
        """Forget a peer; its queued batches are refused, the one that is being written still ends by itself."""
        serving = self._opened()
        gone = self._peers.pop(peer, None)
        if gone is not None:
            gone.leave()
            self._leaving.append(gone)
        self._leaving = [each for each in self._leaving if each.alive]
        serving.forget(peer.epoch)

    def close(self) -> None:
        """Stop; ends threads, waiting for 2 s. May be called twice; does nothing in a forked child."""
        if self._serving is None or not self._owner.is_here:
            return
        for peer in list(self._peers):
            self.detach(peer)
        until = time.monotonic() + CLOSE_S
        for each in self._leaving:
            each.join(max(0.0, until - time.monotonic()))
        self._limbo.close()
        self._serving.close()
        self._serving = None

    def info(self) -> dict[str, object]:
        """For people: library, backend, devices and settings in force, peers, and what the library said of them."""
        serving = self._opened()
        return {
            "library": library.version(),
            "backend": self._place.backend,
            "network_devices": precautions.active_devices(),
            "gpus": library.gpu_count(),
            **self._options._asdict(),
            "environment": {name: value for name, value in os.environ.items() if name.startswith("MORI_")},
            "peers": {
                str(name): "attached" if each.target else "not attached" for name, each in list(self._peers.items())
            },
            "served": len(serving),
            "rebuilds": serving.rebuilds + sum(each.rebuilds for each in [*self._peers.values(), *self._leaving]),
            "events": [*serving.events, *(words for each in list(self._peers.values()) for words in each.events)],
            "on_their_way": len(self._limbo),
        }

    def tryout(self) -> list[Finding]:
        """What is installed, which backends there are, and whether two processes of this host can transfer."""
        from kvferry.engines.mori.tryout import tryout

        return tryout()

    def _opened(self) -> Serving:
        if self._serving is None:
            raise not_open(self.name)
        self._owner.check()
        return self._serving

    def _check(self, number: int, region: Region) -> None:
        """Refuse, by number, what is no memory that this backend moves."""
        if region.address <= 0 or region.nbytes < 0 or region.address + region.nbytes >= 1 << 63:
            raise EngineError(f"region {number}, {region.nbytes} bytes at {region.address:#x}, is no memory")
        gpus = library.gpu_count()
        if region.device >= gpus:
            raise EngineError(f"region {number} lies on device {region.device}; HIP finds {gpus} devices")
        if region.device < 0 and self._place.backend == "xgmi":
            raise EngineError(
                f"region {number}, {region.nbytes} bytes at {region.address:#x}, lies in host memory; "
                "XGMI moves GPU memory",
                hint="option backend=rdma moves host memory",
            )

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

    def _overdue(self, now: float) -> list[Done]:
        """Attachments that are waited for no more; a stopped peer is not known by anything else."""
        late = [ticket for ticket, until in self._attaching.items() if until < now]
        for ticket in late:
            del self._attaching[ticket]
            self._given_up.add(ticket)
        words = f"no answer within {self._options.attach_timeout_s:g} s"
        return [Done(one, Outcome.FAILED_QUIET, words, "deadline") for one in late]


def _backend(wanted: str) -> str:
    """The backend to use; raises EngineUnavailable where there is no device for it."""
    devices, gpus = precautions.active_devices(), library.gpu_count()
    if wanted in {"rdma", "auto"} and devices:
        return "rdma"
    if wanted in {"xgmi", "auto"} and gpus:
        return "xgmi"
    lacking = {"rdma": "no RDMA device with a port that is up", "xgmi": "no GPU that HIP finds"}
    why = " and ".join(text for name, text in lacking.items() if wanted in {name, "auto"})
    raise EngineUnavailable(f"MORI has nothing to write by here: {why}", hint="see docs/mori.md for what it needs")
