"""A TCP connection to the first address that answers, without waiting."""

from __future__ import annotations

import socket

from kvferry.engines.local.descriptors import OUT_OF_DESCRIPTORS, why_none_is_left
from kvferry.engines.local.resolve import Address, Resolution
from kvferry.engines.local.syscalls import error_name
from kvferry.errors import WireError


class Dial:
    """Tries addresses one after the other.

    Attributes:
        socket: the one that is connecting or connected; None while names are looked up.
        where: whom it calls, for people.
    """

    def __init__(self, where: str, resolution: Resolution | None, addresses: list[Address]) -> None:
        self.where = where
        self.socket: socket.socket | None = None
        self._resolution = resolution
        self._addresses: list[Address] | None = addresses if resolution is None else None
        self._problem: OSError | None = None
        self._stale: list[socket.socket] = []

    def begin(self) -> socket.socket | None:
        """The socket, connecting or connected; None as long as the addresses are not known.

        Raises:
            WireError: no address is left; it says what was wrong with the last one.
        """
        if self.socket is None and self._known():
            self._next_address()
        return self.socket

    def failed(self, problem: OSError) -> None:
        """The address that is being tried can't be reached: the next `begin` goes on with the next one."""
        self._problem = problem
        self._set_aside()

    def tidy(self) -> None:
        """Close the sockets of addresses that failed; only when nobody waits on them any more."""
        while self._stale:
            self._stale.pop().close()

    def close(self) -> None:
        """Close what is open."""
        self._set_aside()
        self.tidy()

    def _known(self) -> bool:
        if self._addresses is None and self._resolution is not None:
            self._addresses = self._resolution.addresses
        return self._addresses is not None

    def _next_address(self) -> None:
        while self._addresses:
            family, address = self._addresses.pop(0)
            try:
                self.socket = socket.socket(family, socket.SOCK_STREAM)
                self.socket.setblocking(False)
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.socket.connect(address)
            except BlockingIOError:
                return
            except OSError as error:
                self.failed(error)
                continue
            return
        raise WireError(f"{self.where} can't be reached: {self._reason()}")

    def _reason(self) -> str:
        if self._resolution is not None and self._resolution.why:
            return self._resolution.why
        if self._problem is None:
            return "no address"
        if self._problem.errno in OUT_OF_DESCRIPTORS:
            return why_none_is_left("this process", self._problem)
        return error_name(self._problem)

    def _set_aside(self) -> None:
        # not closed yet: a new socket with the same number would be taken for the one that is being waited on
        if self.socket is not None:
            self._stale.append(self.socket)
            self.socket = None
