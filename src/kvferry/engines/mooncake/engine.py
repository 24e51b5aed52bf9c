"""The Mooncake engine: an instance of the library for each peer, on the side that writes and on the other."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engines.findings import Finding
from kvferry.engines.mooncake import library
from kvferry.engines.mooncake.blob import Blob, decode, encode
from kvferry.engines.mooncake.instance import Instance, Place
from kvferry.engines.mooncake.options import Options, parse
from kvferry.engines.mooncake.peer import Peer, Unproven
from kvferry.engines.mooncake.quiet import LIMITS
from kvferry.engines.mooncake.serving import Serving
from kvferry.engines.per_peer import PeerEngine, PeerThread
from kvferry.engines.seam import Caps, EngineConfig, Region
from kvferry.errors import EngineError
from kvferry.ids import Incarnation, PeerId

ATTACH_S = 5.0
"""What attaching may take beside one transfer's limit."""


class MooncakeEngine(PeerEngine[Instance, Blob]):
    """Moves batches with Mooncake's transfer engine, and its memory is written to by peers that do so.

    Options: `protocol` ("tcp", "rdma", ...) is handed to the library, which does not heed it: it takes RDMA if it finds
    devices for that and MC_FORCE_TCP is unset, else TCP; `info` says which. `devices`, `gpu`: the network devices it
    may use (see `engines.devices`). `timeout_s`: after how many seconds a transfer is given up, 5 or more; 10
    unless MC_TRANSFER_TIMEOUT says otherwise. It is one setting for the process, as are the range of ports and whether
    addresses are IPv6, which the first engine of the process decides.

    LANDED: the library said that the write is done, so that the target has acknowledged each row after writing it.
    FAILED_QUIET: only what was refused before the library saw it. All else is FAILED_UNKNOWN: the library goes on
    writing for a while after it has reported a failure. The instance that failed is destroyed at once, and the peer has
    to be attached again. QUIET follows, by TCP only (see `quiet`): as soon as the target is gone or has shut this
    process out, else with that attachment; not as long as the target is stopped.

    A fence shuts the whole peer out at once, whatever claim it is asked for and whether or not its process is stopped:
    each connection is told (`personal`) of an instance of its own, which is destroyed, by RDMA with its queue pairs and
    memory keys. The library listens on all interfaces, whatever `bind_host` is, and whoever reaches its ports may read
    and write all registered memory.
    Calls of the seam only fill queues that the peers' threads take from: ANY_THREAD.
    A call that is blocked can't be ended: `close` waits for 2 s, then leaves that peer's thread, a daemon, to itself;
    the thread ends when the call returns, a minute later at most, and keeps its instance until then.
    """

    name = "mooncake"
    caps = Caps.FENCE | Caps.ANY_THREAD
    limits = LIMITS

    def __init__(self) -> None:
        library.check_installed()
        super().__init__()
        self._unproven: dict[Incarnation, list[Unproven]] = {}
        self._options = Options()

    def open(self, config: EngineConfig) -> None:
        """Start an instance that peers can write to.

        Raises:
            ConfigError: an option is unknown or has a value that isn't, or the environment has a setting under which
                outcomes would not be true.
            EngineUnavailable: the library can't be imported.
            EngineError: it is open already, or the library can't start.
        """
        self._check_closed()
        self._options = parse(config.options)
        library.check_environment()
        host = config.advertise_host.strip("[]")
        library.set_environment(self._options.timeout_s, config.data_ports, ipv6=":" in host)
        self._place = Place(host, self._options.protocol, self._options.devices, self._options.timeout_s)
        self._start(Serving(self._place, config.me.incarnation))

    def info(self) -> dict[str, object]:
        """For people: library, transport in use and how that is known, session, peers, instances given up."""
        main = self._opened().main
        return {
            "library": library.version(),
            "transport": main.transport,
            "protocol_asked_for": self._options.protocol,
            "network_devices": main.network_devices,
            "session": main.session,
            "timeout_s": self._options.timeout_s,
            **self._described_peers(),
            "unproven": sum(map(len, self._unproven.values())),
        }

    def tryout(self) -> list[Finding]:
        """What is installed, and whether two processes of this host can transfer."""
        from kvferry.engines.mooncake.tryout import tryout

        return tryout()

    def _check(self, regions: Sequence[Region]) -> None:
        for number, region in enumerate(regions):
            if region.device >= 0:
                raise EngineError(f"region {number} lies on device {region.device}; this engine moves host memory")
            if region.address <= 0 or region.nbytes < 0 or region.address + region.nbytes >= 1 << 64:
                raise EngineError(f"region {number}, {region.nbytes} bytes at {region.address:#x}, is no memory")

    def _encoded(self, said: Blob) -> bytes:
        return encode(said)

    def _decoded(self, raw: bytes, peer: PeerId) -> Blob:
        return decode(raw, peer)

    def _new_peer(self, name: PeerId, before: PeerThread[Blob] | None) -> Peer:
        unproven = self._unproven.setdefault(name.incarnation, [])
        return Peer(name, self._place, lambda: self._regions, self._tickets.report, unproven, before)

    def _attach_s(self) -> float:
        return self._options.timeout_s + ATTACH_S
