"""What peers write to: by RDMA one engine of the library per connection, so that one peer can be shut out for good.

The library's target does not tell writers apart, and memory can't be registered twice with one engine. What arrives at
an engine ends with it: its queue pairs are destroyed and its memory is deregistered when it is closed, whatever the
writer does, stopped or not, here or on another host. By XGMI the writer's GPU writes and nothing of the target is in
between: all are told of one engine, and nobody can be shut out.
"""

from __future__ import annotations

import itertools
import logging
import threading

from kvferry.engines.host import this_process
from kvferry.engines.mori import library, precautions
from kvferry.engines.mori.blob import VERSION, Blob, checksum_of
from kvferry.engines.mori.door import Door
from kvferry.engines.mori.instance import Instance, Place
from kvferry.engines.seam import Region
from kvferry.errors import EngineError
from kvferry.ids import Incarnation

log = logging.getLogger("kvferry.mori")

MAIN = 0
"""The epoch of whoever was given the plain blob."""

HEAR_EVERY_S = 0.5
_KEPT_EVENTS = 20


class Serving:
    """Instances by the epoch of the connection that was told of them; epochs are this process's own numbers.

    Thread-safe: connections are told on another thread than the engine's.

    Attributes:
        can_shut_out: whether each connection has an instance of its own.
        events: what the library has said of peers and ports, in words, the last ones.
        rebuilds: how often the main instance was made anew after it had lost its port.
    """

    def __init__(self, place: Place, incarnation: Incarnation) -> None:
        self._place = place
        self._incarnation = incarnation
        self.can_shut_out = place.backend == "rdma"
        self._lock = threading.Lock()
        self._regions: tuple[Region, ...] = ()
        self._main = Instance(place, is_written_to=True)
        self._door = None if self.can_shut_out else Door()
        self._open: dict[int, Instance] = {MAIN: self._main}
        self._shut: dict[int, Blob] = {}
        self._on_main: set[int] = set()
        self.events: list[str] = []
        self.rebuilds = 0
        self._heard_at = 0.0
        self._is_lost = False

    def __len__(self) -> int:
        """How many instances there are."""
        return len(self._open)

    def blob(self, epoch: int) -> Blob:
        """What the peer of a connection is told; makes an instance for it if there is none.

        Where none can be made it is told of the main one, and can't be shut out alone.
        """
        with self._lock:
            if epoch in self._shut:
                return self._shut[epoch]
            if self.can_shut_out and epoch not in self._open and epoch not in self._on_main:
                self._make(epoch)
            return self._blob(self._open.get(epoch, self._main))

    def register(self, regions: tuple[Region, ...]) -> None:
        """Replace the registered regions of all instances.

        Raises:
            EngineError: a region, which it names, can't be registered; then none is.
        """
        with self._lock:
            self._regions = ()
            try:
                for instance in self._open.values():
                    instance.register(regions)
            except EngineError:
                for instance in self._open.values():
                    instance.register(())
                raise
            self._regions = regions

    def shut_out(self, epoch: int) -> str:
        """End what the peer of a connection writes to; nothing of it lands any more when this returns "".

        Returns:
            Why that is not proven, or "".
        """
        if not self.can_shut_out:
            return "by XGMI the peer's GPU writes, and nothing here can stop it or see its end"
        with self._lock:
            if epoch in self._on_main:
                return "no engine of its own could be made for it"
            if epoch in self._shut:
                return ""
            if epoch not in self._open:
                self._make(epoch)  # nothing was told yet: what is told later must lead nowhere
            if epoch not in self._open:
                return "no engine could be made for it"
            instance = self._open.pop(epoch)
            self._shut[epoch] = self._blob(instance)
            if not instance.close():
                return "its engine can't be destroyed here: with it MORI would close descriptor 0, which is not its own"
            return ""

    def forget(self, epoch: int) -> None:
        """End an instance that no peer needs any more; the main one stays."""
        with self._lock:
            self._on_main.discard(epoch)
            if epoch != MAIN and epoch in self._open:
                self._open.pop(epoch).close()

    def step(self, now: float) -> None:
        """Welcome those who look whether somebody is here, and now and then hear what the library says."""
        if self._door is not None:
            self._door.welcome()
        if now - self._heard_at < HEAR_EVERY_S:
            return
        self._heard_at = now
        with self._lock:
            heard = {epoch: instance.hear() for epoch, instance in self._open.items()}
            self._is_lost = self._is_lost or bool(heard.get(MAIN))
            if self._is_lost and MAIN in self._open and precautions.active_devices():
                self._rebuild()
        for words in itertools.chain(*heard.values()):
            log.warning("MORI says of those who write here: %s", words)
            self.events = [*self.events, words][-_KEPT_EVENTS:]

    def close(self) -> None:
        """End all."""
        with self._lock:
            if self._door is not None:
                self._door.close()
            for instance in self._open.values():
                instance.close()

    def _rebuild(self) -> None:
        """Make the main instance anew: after a lost port nobody reaches it. Those of connections end with these."""
        try:
            instance = Instance(self._place, is_written_to=True)
            instance.register(self._regions)
        except EngineError:
            log.exception("MORI's engine could not be made anew; it is tried again")
            return
        self._main.close()
        self._main = self._open[MAIN] = instance
        self._is_lost = False
        self.rebuilds += 1

    def _make(self, epoch: int) -> None:
        instance = None
        try:
            instance = Instance(self._place, is_written_to=True)
            instance.register(self._regions)
            self._open[epoch] = instance
        except EngineError:
            log.exception("connection %d shares an engine of MORI with others", epoch)
            if instance is not None:
                instance.close()
            self._on_main.add(epoch)

    def _blob(self, instance: Instance) -> Blob:
        descriptor, memory, nonce = instance.descriptor, instance.described, instance.nonce
        return Blob(
            version=VERSION,
            backend=self._place.backend,
            incarnation=self._incarnation,
            engine=descriptor,
            memory=memory,
            nonce=nonce,
            nonce_digest=instance.nonce_digest,
            door="" if self._door is None else self._door.name,
            process=this_process(),
            checksum=checksum_of(descriptor, memory, nonce),
            library=library.version(),
        )
