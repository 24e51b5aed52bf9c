"""What peers write to: by RDMA one engine of the library per connection (see `per_peer.served`).

Memory can't be registered twice with one engine. What arrives at an engine ends with it: its queue pairs are destroyed
and its memory is deregistered when it is closed, whatever the writer does, stopped or not, here or on another host. By
XGMI the writer's GPU writes and nothing of the target is in between: all are told of one engine, and nobody can be shut
out.
"""

from __future__ import annotations

import itertools

from kvferry.engines.host import this_process
from kvferry.engines.mori import library, precautions
from kvferry.engines.mori.blob import VERSION, Blob, checksum_of
from kvferry.engines.mori.door import Door
from kvferry.engines.mori.instance import Instance, Place
from kvferry.engines.per_peer import MAIN, Served
from kvferry.errors import EngineError
from kvferry.ids import Incarnation

HEAR_EVERY_S = 0.5
_KEPT_EVENTS = 20


class Serving(Served[Instance, Blob]):
    """The engines of this process that are written to.

    Attributes:
        can_shut_out: whether each connection has an instance of its own.
        events: what the library has said of peers and ports, in words, the last ones.
    """

    def __init__(self, place: Place, incarnation: Incarnation) -> None:
        self._place = place
        self._incarnation = incarnation
        self.can_shut_out = place.backend == "rdma"
        self._door = None if self.can_shut_out else Door()
        self.events: list[str] = []
        self._heard_at = 0.0
        self._is_lost = False
        super().__init__("mori")

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
            self._log.warning("MORI says of those who write here: %s", words)
            self.events = [*self.events, words][-_KEPT_EVENTS:]

    def close(self) -> None:
        """End all."""
        if self._door is not None:
            self._door.close()
        super().close()

    def _rebuild(self) -> None:
        """Make the main instance anew: after a lost port nobody reaches it. Those of connections end with these."""
        try:
            instance = self._new()
            instance.register(self._regions)
        except EngineError:
            self._log.exception("MORI's engine could not be made anew; it is tried again")
            return
        self.main.close()
        self.main = self._open[MAIN] = instance
        self._is_lost = False
        self.rebuilds += 1

    def _new(self) -> Instance:
        return Instance(self._place, is_written_to=True)

    def _why_never(self) -> str:
        return "" if self.can_shut_out else "by XGMI the peer's GPU writes, and nothing here can stop it or see its end"

    def _end(self, instance: Instance) -> str:
        why = "its engine can't be destroyed here: with it MORI would close descriptor 0, which is not its own"
        return "" if instance.close() else why

    def _forget(self, instance: Instance) -> None:
        instance.close()

    def _blob_of(self, instance: Instance) -> Blob:
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
