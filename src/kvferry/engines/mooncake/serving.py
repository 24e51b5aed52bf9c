"""What peers write to: one instance of the library per connection (see `per_peer.served`).

Its destructor closes all connections and waits for the thread that reads them (TCP), or destroys the queue pairs and
deregisters the memory that peers were given keys of (RDMA), so that nothing lands afterwards, whatever the writer does,
stopped or not, here or on another host. The ports where it was reached are kept, so that a writer that tries again
meets nobody: by RDMA it would ask there for new keys.
"""

from __future__ import annotations

import socket
import time

from kvferry.engines.mooncake import library
from kvferry.engines.mooncake.blob import VERSION, Blob
from kvferry.engines.mooncake.instance import Instance, Place
from kvferry.engines.mooncake.sockets import has_connections, held, refuse
from kvferry.engines.per_peer import MAIN, Served
from kvferry.ids import Incarnation

SWEEP_AFTER_S = 60.0


class Serving(Served[Instance, Blob]):
    """The instances of this process that are written to."""

    def __init__(self, place: Place, incarnation: Incarnation) -> None:
        self._place = place
        self._incarnation = incarnation
        self._kept_ports: list[socket.socket] = []
        super().__init__("mooncake")

    def close(self) -> None:
        """End all, and let go of their ports."""
        super().close()
        for each in self._kept_ports:
            each.close()
        self._kept_ports.clear()

    def _new(self) -> Instance:
        return Instance(self._place)

    def _sweep(self) -> None:
        """End instances whose writer has gone: by TCP it keeps a connection as long as it is attached.

        By RDMA nothing shows that, so that an instance stays until its peer is fenced or forgotten.
        """
        before = time.monotonic() - SWEEP_AFTER_S
        for epoch, instance in list(self._open.items()):
            is_old = epoch != MAIN and instance.made_at < before and instance.transport == "tcp"
            if is_old and has_connections(instance.data_ports) is False:
                self._open.pop(epoch).close()

    def _end(self, instance: Instance) -> str:
        """Close it, and occupy its ports from before to the end, without listening."""
        listeners = held(instance.ports)
        self._kept_ports += listeners.values()
        instance.close()
        kept = {port for port, each in listeners.items() if refuse(each)}
        free = [port for port in instance.ports if port not in kept]
        return f"its port {free[0]} could not be kept" if free else ""

    def _forget(self, instance: Instance) -> None:
        instance.close()

    def _blob_of(self, instance: Instance) -> Blob:
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
