"""The target's half of the engine: its doors, its accept thread, and the record of who can write here."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.engines.local.loop import Loop
from kvferry.engines.local.memory_door import MemoryDoor
from kvferry.engines.local.probe import probe_page
from kvferry.engines.local.shares import Shares
from kvferry.engines.local.tcp_door import TcpDoor, listen
from kvferry.engines.local.writers import Writers
from kvferry.engines.seam import EngineConfig
from kvferry.ids import PeerId
from kvferry.plan.batch import Limits


class Target:
    """Listens for as long as the engine is open.

    Attributes:
        writers: who can write here.
        shares: what of the registered memory peers can map.
        memory_door: the Unix socket, unless the mechanism is "tcp".
        port: the TCP port, 0 when the mechanism is "cma" or "shm".
    """

    def __init__(
        self,
        config: EngineConfig,
        mechanism: str,
        token: bytes,
        limits: Limits,
        lanes: int,
        on_change: Callable[[], None],
    ) -> None:
        self.page = probe_page()
        self.writers = Writers(config.grants)
        self.shares = Shares()
        self.memory_door: MemoryDoor | None = None
        self.port = 0
        self._tcp_door: TcpDoor | None = None
        self._loop = Loop("kvferry-local-accept")
        try:
            if mechanism in {"auto", "tcp"}:
                listener = listen(config.bind_host, config.data_ports)
                self.port = listener.getsockname()[1]
                self._tcp_door = TcpDoor(self._loop, listener, token, self.writers, limits, lanes, on_change)
            if mechanism != "tcp":
                offers = {"cma", "shm"} if mechanism == "auto" else {mechanism}
                self.memory_door = MemoryDoor(self._loop, token, self.writers, self.shares, offers, on_change)
        except BaseException:
            self.close()
            raise
        self._loop.start()

    @property
    def garbage(self) -> int:
        """Connections that were turned away because what they said made no sense, or came too late."""
        doors = (self.memory_door, self._tcp_door)
        return sum(door.garbage for door in doors if door is not None)

    @property
    def why_not_shared(self) -> str:
        """Why peers can't map this process's memory, or ""."""
        if self.memory_door is None or "shm" not in self.memory_door.offers:
            return "the peer does not offer shared memory"
        return self.shares.why_not

    def detach(self, peer: PeerId) -> None:
        """Tell a peer's memory writers to stop; end its TCP connections."""
        door = self.memory_door
        if door is not None:
            self._loop.call(lambda: door.half_close(peer))
        for receiver in self.writers.receivers(peer):
            receiver.cut(None)

    def close(self) -> None:
        """End the thread, then the doors."""
        self._loop.stop()
        if self.memory_door is not None:
            self.memory_door.close()
        if self._tcp_door is not None:
            self._tcp_door.close()
        self.shares.close()
