"""The target's TCP side: listens, lets in who shows the token, starts a receiver for each connection."""

from __future__ import annotations

import errno
import itertools
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.engines.local import frames
from kvferry.engines.local.loop import Loop
from kvferry.engines.local.receiver import Receiver
from kvferry.engines.local.writers import Writers
from kvferry.errors import AddressError, WireError
from kvferry.plan.batch import Limits

GREETING_S = 5.0
MAX_GUESTS = 64
_BACKLOG = 128
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass
class _Guest:
    connection: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)


class TcpDoor:
    """Runs in the loop's thread; a stranger costs one descriptor for at most 5 s, and no thread."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        token: bytes,
        writers: Writers,
        limits: Limits,
        on_change: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._token = token
        self._writers = writers
        self._limits = limits
        self._on_change = on_change
        self._guests: dict[int, _Guest] = {}
        self.garbage = 0
        loop.watch(listener.fileno(), self._accept)
        loop.sweep(self._sweep)

    def close(self) -> None:
        """Close what is open; only when the loop has stopped."""
        for guest in self._guests.values():
            guest.connection.close()
        self._guests.clear()
        self._listener.close()
        receivers = self._writers.receivers()
        for receiver in receivers:
            receiver.cut(None)
        for receiver in receivers:
            receiver.join()

    def _accept(self) -> None:
        connection = accept(self._listener, self._loop)
        if connection is None:
            return
        if len(self._guests) >= MAX_GUESTS:
            # the one that has been silent longest: an honest writer speaks as soon as it is connected
            oldest = next(iter(self._guests.values()))
            self._release(oldest)
            self._turn_away(oldest)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        guest = _Guest(connection, time.monotonic() + GREETING_S)
        self._guests[connection.fileno()] = guest
        self._loop.watch(connection.fileno(), lambda: self._greet(guest))

    def _greet(self, guest: _Guest) -> None:
        try:
            said = guest.connection.recv(frames.AUTH_BYTES - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        guest.said += said
        if said and len(guest.said) < frames.AUTH_BYTES:
            return
        self._release(guest)
        if said:
            self._admit(guest)
        else:
            self._turn_away(guest)

    def _admit(self, guest: _Guest) -> None:
        try:
            peer = frames.decode_auth(bytes(guest.said), self._token)
        except WireError:
            self._turn_away(guest)
            return
        receiver = Receiver(guest.connection, peer, self._writers.grants, self._limits, self._on_change)
        refusal = self._writers.admit_receiver(peer, receiver)
        if refusal:
            send_and_forget(guest.connection, frames.encode_reply(frames.REFUSED, 0, refusal))
            receiver.discard()
        else:
            receiver.start(self._ended, self._count_garbage)

    def _ended(self, receiver: Receiver) -> None:
        self._writers.forget_receiver(receiver.peer, receiver)

    def _sweep(self) -> bool:
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if guest.until < now]:
            self._release(guest)
            self._turn_away(guest)
        return bool(self._guests)

    def _release(self, guest: _Guest) -> None:
        self._loop.unwatch(guest.connection.fileno())
        del self._guests[guest.connection.fileno()]

    def _turn_away(self, guest: _Guest) -> None:
        self._count_garbage()
        guest.connection.close()

    def _count_garbage(self) -> None:
        self.garbage += 1


def listen(host: str, ports: tuple[int, int]) -> socket.socket:
    """Listen on the first free port.

    Args:
        host: name or address to bind, IPv4 or IPv6.
        ports: (first, last) to try; (0, 0) lets the system choose.

    Raises:
        AddressError: the host doesn't resolve, or no port of the range can be bound.
    """
    first, last = ports
    if not 0 <= first <= last <= 65535:
        raise AddressError(f"data_ports {first}-{last} is no range of ports", hint="0 <= first <= last <= 65535")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError(f"bind_host {host!r} does not resolve: {error}", hint="set bind_host") from error
    problem: OSError | None = None
    for port, (family, _, _, _, address) in itertools.product(range(first, last + 1), found):
        listener, problem = _bound(family, (address[0], port, *address[2:]))
        if listener is not None:
            return listener
    raise AddressError(
        f"the local engine can't listen on {host} in the port range {first}-{last}: {problem}",
        hint="free a port, widen data_ports, or use (0, 0) to let the system choose",
    )


def accept(listener: socket.socket, loop: Loop) -> socket.socket | None:
    """Accept one connection, or None when it has gone or no descriptor is free."""
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in _OUT_OF_DESCRIPTORS:
            # the listener stays readable: without a pause this thread would spin
            loop.pause(0.1)
        return None


def send_and_forget(connection: socket.socket, raw: bytes) -> bool:
    """Send a few bytes without waiting; returns whether they were taken."""
    try:
        return connection.send(raw, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) == len(raw)
    except OSError:
        return False


def _bound(family: socket.AddressFamily, address: tuple[object, ...]) -> tuple[socket.socket | None, OSError | None]:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        return None, error
    listener.setblocking(False)
    return listener, None
