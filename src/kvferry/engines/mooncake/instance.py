"""One engine of the library, with its registrations; used by one thread at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvferry.engines.devices import rdma_devices
from kvferry.engines.mooncake import at_rest
from kvferry.engines.mooncake.blob import NONCE_BYTES
from kvferry.engines.mooncake.library import engine_class
from kvferry.engines.mooncake.sockets import listening_ports, wake_listener
from kvferry.engines.owner import keep_in_forks
from kvferry.engines.seam import Region
from kvferry.errors import EngineError
from kvferry.plan.batch import Batch

METADATA = "P2PHANDSHAKE"
"""Peers ask each other; no metadata server."""

_CODES = {-7: "it overlaps memory that is registered already", -1: "the library does not say why"}


_starting = threading.Lock()
"""One at a time, so that the ports that one opens are not taken for another's."""


class Place(NamedTuple):
    """How instances are made.

    Attributes:
        host: address that peers use.
        protocol: handed to the library.
        devices: names of network devices, with commas.
        timeout_s: after how many seconds the library gives a transfer up.
    """

    host: str
    protocol: str
    devices: str
    timeout_s: int


class Instance:
    """A started engine of the library.

    Attributes:
        session: host:port; how peers name it.
        data_ports: where data connections arrive; more than one if another thread began to listen meanwhile, and none
            over RDMA.
        ports: these and, first, where it is asked for its metadata.
        network_devices: the RDMA devices of this system.
        transport: "tcp" where it is certain, else "rdma".
        made_at: when it was started, on the monotonic clock.
    """

    def __init__(self, place: Place) -> None:
        self.made_at = time.monotonic()
        self._engine: Any = engine_class()()
        with _starting:
            before = listening_ports()
            code = self._engine.initialize(place.host, METADATA, place.protocol, place.devices)
            opened = listening_ports() - before
        if code:
            ports = "-".join(os.environ.get(name, "any") for name in ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"))
            raise EngineError(
                f"Mooncake can't start an engine on {place.host}, ports {ports} (initialize returned {code})",
                hint="it needs two free data_ports for each process and two for each peer; MC_LOG_LEVEL=INFO shows the "
                "library's reasons",
            )
        port = self._engine.get_rpc_port()
        self.session = f"[{place.host}]:{port}" if ":" in place.host else f"{place.host}:{port}"
        self.data_ports = sorted(opened - {port})
        # the library takes TCP only when it has found none; its own answer, `get_local_topology`, takes a second, since
        # it starts one more engine each time
        self.network_devices = rdma_devices()
        self.transport = "rdma" if self.network_devices and "MC_FORCE_TCP" not in os.environ else "tcp"
        self.ports = [port, *self.data_ports]
        self._timeout_s = place.timeout_s
        self._pace = at_rest.Pace()
        self._regions: tuple[Region, ...] = ()
        self._page = np.frombuffer(bytearray(os.urandom(NONCE_BYTES)), np.uint8)
        self._engine.register_memory(self.page_address, NONCE_BYTES)
        keep_in_forks(self)

    @property
    def page_address(self) -> int:
        """Where its own 32 random bytes lie, which peers may read."""
        return int(self._page.ctypes.data)

    @property
    def page_digest(self) -> bytes:
        """SHA-256 of these bytes."""
        return hashlib.sha256(self._page.tobytes()).digest()

    def register(self, regions: tuple[Region, ...]) -> None:
        """Replace the registered regions; does nothing if they are the same.

        Raises:
            EngineError: a region, which it names, can't be registered; then none is.
        """
        if regions == self._regions:
            return
        self._unregister()
        addresses, sizes = [region.address for region in regions], [region.nbytes for region in regions]
        self._regions = regions
        if regions and self._engine.batch_register_memory(addresses, sizes):
            self._unregister()
            self._register_singly(regions)

    def probe(self, session: str) -> int:
        """Ask a session whether it is there; 0 is yes. Waits for a stopped process, for a minute."""
        return int(self._engine.send_probe(session))

    def read(self, session: str, address: int) -> bytes | None:
        """Read a peer's 32 bytes into the own page, which peers must not want any more; None if it fails."""
        code = self._engine.transfer_sync_read(session, self.page_address, address, NONCE_BYTES)
        return None if code else self._page.tobytes()

    def write(self, session: str, batches: Sequence[Batch]) -> int:
        """Write batches at once; waits until the peer has acknowledged each row. 0 is success, all else is not."""
        rows = at_rest.Rows(
            *(
                [number for batch in batches for number in getattr(batch, name).tolist()]
                for name in ("src", "dst", "nbytes")
            )
        )
        # by RDMA nothing here copies, and this call tries again by another device
        if self.transport != "tcp" or sum(batch.total_bytes for batch in batches) < at_rest.FROM_BYTES:
            return int(self._engine.batch_transfer_sync_write(session, *rows))
        return at_rest.write(self._engine, session, rows, self._pace, self._timeout_s)

    def close(self) -> None:
        """Destroy it: when this returns nothing reads or writes this process's memory for it any more."""
        if self._engine is not None:
            with contextlib.suppress(OSError):  # out of descriptors: its end takes a second more
                wake_listener(self.ports[0])
            self._engine = None

    def _unregister(self) -> None:
        if self._regions:
            self._engine.batch_unregister_memory([region.address for region in self._regions])
        self._regions = ()

    def _register_singly(self, regions: tuple[Region, ...]) -> None:
        """Find the region that the library refused."""
        for number, region in enumerate(regions):
            code = self._engine.register_memory(region.address, region.nbytes)
            if code:
                self._unregister()
                raise EngineError(
                    f"Mooncake can't register region {number}, {region.nbytes} bytes at {region.address:#x}: "
                    f"{_CODES.get(code, 'unknown')} [{code}]"
                )
            self._regions = regions[: number + 1]
