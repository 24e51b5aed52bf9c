"""Host names to addresses without making the caller wait for a name server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

Address = tuple[socket.AddressFamily, tuple[object, ...]]


class Resolution:
    """The addresses of a host and port; `addresses` stays None while a name server is being asked."""

    def __init__(self, host: str, port: int, on_done: Callable[[], None]) -> None:
        self.addresses: list[Address] | None = None
        self.why = ""
        self._host, self._port, self._on_done = host, port, on_done
        try:
            self.addresses = self._look_up(socket.AI_NUMERICHOST)
        except OSError:
            # a thread of its own: getaddrinfo can take seconds and can't be interrupted
            threading.Thread(target=self._ask, name=f"kvferry-local-resolve-{host}", daemon=True).start()

    def _ask(self) -> None:
        try:
            self.addresses = self._look_up(0)
        except OSError as error:
            self.why = f"{self._host!r} does not resolve: {error}"
            self.addresses = []
        self._on_done()

    def _look_up(self, flags: int) -> list[Address]:
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, address) for family, _, _, _, address in found]
