"""What peers write to: one instance of the library per connection, so that one peer can be shut out for good.

The library's target does not tell writers apart, and can't refuse one. But what arrives at an instance ends with it:
its destructor closes all connections and waits for the thread that reads them (TCP), or destroys the queue pairs and
deregisters the memory that peers were given keys of (RDMA), so that nothing lands afterwards, whatever the writer does,
stopped or not, here or on another host. The ports where it was reached are kept, so that a writer that tries again
meets nobody: by RDMA it would ask there for new keys.
"""

from __future__ import annotations

import logging
import socket
import threading
import time

from kvferry.engines.mooncake import library
from kvferry.engines.mooncake.blob import VERSION, Blob
from kvferry.engines.mooncake.instance import Instance, Place
from kvferry.engines.mooncake.sockets import has_connections, held, refuse
from kvferry.engines.seam import Region
from kvferry.errors import EngineError
from kvferry.ids import Incarnation

log = logging.getLogger("kvferry.mooncake")

MAIN = 0
"""The epoch of whoever was given the plain blob."""

SWEEP_AFTER_S = 60.0


class Serving:
    """Instances by the epoch of the connection that was told of them; epochs are this process's own numbers.

    Thread-safe: connections are told on another thread than the engine's.

    Attributes:
        main: the instance of the plain blob.
    """

    def __init__(self, place: Place, incarnation: Incarnation) -> None:
        self._place = place
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._regions: tuple[Region, ...] = ()
        self.main = Instance(place)
        self._open: dict[int, tuple[Instance, float]] = {MAIN: (self.main, time.monotonic())}
        self._shut: dict[int, Blob] = {}
        self._on_main: set[int] = set()
        self._kept_ports: list[socket.socket] = []

    def __len__(self) -> int:
        """How many instances there are."""
        return len(self._open)

    def blob(self, epoch: int) -> Blob:
        """What the peer of a connection is told; makes an instance for it if there is none, in a few milliseconds.

        Where none can be made it is told of the main one, and can't be shut out alone.
        """
        with self._lock:
            if epoch in self._shut:
                return self._shut[epoch]
            if epoch not in self._open and epoch not in self._on_main:
                self._sweep()
                self._make(epoch)
            return self._blob(self._open[epoch][0] if epoch in self._open else self.main)

    def register(self, regions: tuple[Region, ...]) -> None:
        """Replace the registered regions of all instances.

        Raises:
            EngineError: a region, which it names, can't be registered; then none is.
        """
        with self._lock:
            self._regions = ()
            try:
                for instance, _ in self._open.values():
                    instance.register(regions)
            except EngineError:
                for instance, _ in self._open.values():
                    instance.register(())
                raise
            self._regions = regions

    def shut_out(self, epoch: int) -> str:
        """End what the peer of a connection writes to; nothing of it lands any more when this returns "".

        Returns:
            Why that is not proven, or "".
        """
        with self._lock:
            if epoch in self._on_main:
                return "no instance of its own could be made for it"
            if epoch in self._shut:
                return ""
            if epoch not in self._open:
                self._make(epoch)  # nothing was told yet: what is told later must lead nowhere
            if epoch not in self._open:
                return "no instance could be made for it"
            instance = self._open.pop(epoch)[0]
            self._shut[epoch] = self._blob(instance)
            return self._end_for_good(instance)

    def forget(self, epoch: int) -> None:
        """End an instance that no peer needs any more; the main one stays."""
        with self._lock:
            self._on_main.discard(epoch)
            if epoch != MAIN and epoch in self._open:
                self._open.pop(epoch)[0].close()

    def close(self) -> None:
        """End all."""
        with self._lock:
            for instance, _ in self._open.values():
                instance.close()
            for each in self._kept_ports:
                each.close()
            self._kept_ports.clear()

    def _make(self, epoch: int) -> None:
        instance = None
        try:
            instance = Instance(self._place)
            instance.register(self._regions)
            self._open[epoch] = instance, time.monotonic()
        except (EngineError, OSError):
            log.exception("connection %d shares an instance with others", epoch)
            if instance is not None:
                instance.close()
            self._on_main.add(epoch)

    def _sweep(self) -> None:
        """End instances whose writer has gone: by TCP it keeps a connection as long as it is attached.

        By RDMA nothing shows that, so that an instance stays until its peer is fenced or forgotten.
        """
        before = time.monotonic() - SWEEP_AFTER_S
        for epoch, (instance, made_at) in list(self._open.items()):
            is_old = epoch != MAIN and made_at < before and instance.transport == "tcp"
            if is_old and has_connections(instance.data_ports) is False:
                self._open.pop(epoch)[0].close()

    def _end_for_good(self, instance: Instance) -> str:
        """Close an instance, and occupy its ports from before to the end, without listening; why that failed, or ""."""
        listeners = held(instance.ports)
        self._kept_ports += listeners.values()
        instance.close()
        kept = {port for port, each in listeners.items() if refuse(each)}
        free = [port for port in instance.ports if port not in kept]
        return f"its port {free[0]} could not be kept" if free else ""

    def _blob(self, instance: Instance) -> Blob:
        return Blob(
            version=VERSION,
            session=instance.session,
            incarnation=self._incarnation,
            nonce_address=instance.page_address,
            nonce_digest=instance.page_digest,
            data_ports=instance.data_ports,
            transport=instance.transport,
            library=library.version(),
        )
