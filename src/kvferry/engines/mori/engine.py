"""The MORI engine: an engine of the library for each peer, on the side that writes and, by RDMA, on the other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from kvferry.engines.findings import Finding
from kvferry.engines.mori import library, precautions
from kvferry.engines.mori.blob import Blob, decode, encode
from kvferry.engines.mori.instance import Instance, Place
from kvferry.engines.mori.limbo import LOOK_EVERY_S, Limbo
from kvferry.engines.mori.options import Options, parse
from kvferry.engines.mori.peer import Peer
from kvferry.engines.mori.serving import HEAR_EVERY_S, Serving
from kvferry.engines.per_peer import PeerEngine, PeerThread
from kvferry.engines.seam import Caps, Done, EngineConfig, Region
from kvferry.errors import EngineError, EngineUnavailable
from kvferry.ids import PeerId
from kvferry.plan.batch import Limits


class MoriEngine(PeerEngine[Instance, Blob]):
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
        super().__init__()
        self.caps = Caps.NONE
        self._limbo = Limbo()

    def open(self, config: EngineConfig) -> None:
        """Start an engine of the library that peers can write to.

        Raises:
            ConfigError: an option is unknown or has a value that isn't, or the environment has a setting under which
                outcomes would not be true.
            EngineUnavailable: the library can't be imported, or finds no device; by RDMA a child process has tried.
            EngineError: it is open already, or can't listen at the address.
        """
        self._check_closed()
        self._options: Options = parse(config.options)
        library.check_environment()
        library.set_environment(self._options)
        cpp = library.load()
        backend = _backend(self._options.backend)
        if backend == "rdma":
            precautions.bindable(config.bind_host, config.data_ports)
            precautions.try_backend(backend, config.bind_host)
        self._place = Place(cpp, backend, config.bind_host, config.advertise_host, config.data_ports)
        self._serving = Serving(self._place, config.me.incarnation)
        self._start(self._serving)
        self.caps = Caps.DEVICE_MEMORY if library.gpu_count() else Caps.NONE
        if self._serving.can_shut_out:
            self.caps |= Caps.FENCE

    def info(self) -> dict[str, object]:
        """For people: library, backend, devices and settings in force, peers, and what the library said of them."""
        described = self._described_peers()
        peers = list(self._peers.values())
        return {
            "library": library.version(),
            "backend": self._place.backend,
            "network_devices": precautions.active_devices(),
            "gpus": library.gpu_count(),
            **self._options._asdict(),
            "environment": {name: value for name, value in os.environ.items() if name.startswith("MORI_")},
            **described,
            "events": [*self._serving.events, *(words for each in peers for words in each.events)],
            "on_their_way": len(self._limbo),
        }

    def tryout(self) -> list[Finding]:
        """What is installed, which backends there are, and whether two processes of this host can transfer."""
        from kvferry.engines.mori.tryout import tryout

        return tryout()

    def _check(self, regions: Sequence[Region]) -> None:
        gpus = library.gpu_count()
        for number, region in enumerate(regions):
            if region.address <= 0 or region.nbytes < 0 or region.address + region.nbytes >= 1 << 63:
                raise EngineError(f"region {number}, {region.nbytes} bytes at {region.address:#x}, is no memory")
            if region.device >= gpus:
                raise EngineError(f"region {number} lies on device {region.device}; HIP finds {gpus} devices")
            if region.device < 0 and self._place.backend == "xgmi":
                raise EngineError(
                    f"region {number}, {region.nbytes} bytes at {region.address:#x}, lies in host memory; "
                    "XGMI moves GPU memory",
                    hint="option backend=rdma moves host memory",
                )
        if self._place.backend == "rdma":
            precautions.check_host_memory(regions)

    def _encoded(self, said: Blob) -> bytes:
        return encode(said)

    def _decoded(self, raw: bytes, peer: PeerId) -> Blob:
        return decode(raw, peer, self._place.backend)

    def _new_peer(self, name: PeerId, before: PeerThread[Blob] | None) -> Peer:  # noqa: ARG002 - they don't meet
        timeout_s = self._options.transfer_timeout_s
        return Peer(name, self._place, lambda: self._regions, self._tickets.report, self._limbo, timeout_s)

    def _attach_s(self) -> float:
        return self._options.attach_timeout_s

    def _look(self, now: float) -> Iterable[Done]:
        self._serving.step(now)
        return self._limbo.news(now)

    def _look_every_s(self) -> float:
        return LOOK_EVERY_S if len(self._limbo) else HEAR_EVERY_S

    def _threads_ended(self) -> None:
        self._limbo.close()


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
