"""The target's TCP side: listens, lets in who proves to hold the token, hands each connection to a receiver."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.engines.local import frames
from kvferry.engines.local.descriptors import OUT_OF_DESCRIPTORS, Spare, descriptor_limit, why_none_is_left
from kvferry.engines.local.lanes import Lanes
from kvferry.engines.local.loop import Loop
from kvferry.engines.local.receiver import Receiver
from kvferry.engines.local.writers import Writers
from kvferry.errors import AddressError, WireError
from kvferry.plan.batch import Limits

GREETING_S = 5.0
PATIENCE_S = 0.5
"""How long a guest may be silent when others wait outside; many honest writers may come at the same moment."""
MAX_GUESTS = 512
_SHARE_OF_DESCRIPTORS = 8  # guests may take an eighth of what the process may open: nothing is known of them
_BACKLOG = 1024


@dataclass
class _Guest:
    connection: socket.socket
    since: float
    nonce: bytes
    said: bytearray = field(default_factory=bytearray)


class TcpDoor:
    """Runs in the loop's thread; a stranger costs one descriptor for at most 5 s, and no thread.

    Who is let in is served by one of a few threads, the lanes, however many connections there are: those of one
    attachment by different ones.
    """

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        token: bytes,
        writers: Writers,
        limits: Limits,
        lanes: int,
        on_change: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._token = token
        self._writers = writers
        self._limits = limits
        self._on_change = on_change
        self._guests: dict[int, _Guest] = {}
        self._full = False
        self._lanes = Lanes("kvferry-local-receive", lanes)
        self.garbage = 0
        loop.watch(listener.fileno(), self._accept)
        loop.sweep(self._sweep)
        self._spare = Spare()

    def close(self) -> None:
        """Close what is open; only when the loop has stopped."""
        for guest in self._guests.values():
            guest.connection.close()
        self._guests.clear()
        self._listener.close()
        self._spare.give()
        self._lanes.stop()
        for receiver in self._writers.receivers():
            receiver.end()

    def _accept(self) -> None:
        if len(self._guests) >= min(MAX_GUESTS, descriptor_limit() // _SHARE_OF_DESCRIPTORS):
            # the others wait outside until one of these has spoken, or was silent for too long
            self._full = True
            self._loop.unwatch(self._listener.fileno())
            return
        try:
            connection = self._listener.accept()[0]
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                self._send_away(why_none_is_left("the target", error))
            return
        self._spare.keep()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        guest = _Guest(connection, time.monotonic(), secrets.token_bytes(frames.NONCE_BYTES))
        self._guests[connection.fileno()] = guest
        self._loop.watch(connection.fileno(), lambda: self._greet(guest))
        send_and_forget(connection, frames.encode_challenge(guest.nonce))

    def _send_away(self, reason: str) -> None:
        """Tell the next caller that no descriptor is left, with the one that was kept for this."""
        if self._spare.give():
            with contextlib.suppress(OSError), self._listener.accept()[0] as connection:
                send_and_forget(connection, frames.encode_reply(frames.REFUSED, 0, reason))
        self._spare.keep()
        # the listener stays readable: without a pause this thread would spin
        self._loop.pause(0.02)

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
            caller = frames.decode_auth(bytes(guest.said), self._token, guest.nonce)
        except WireError:
            self._turn_away(guest)
            return
        try:
            refusal = self._start(guest, caller)
        except OSError as error:
            refusal = why_none_is_left("the target", error)
        if refusal:
            send_and_forget(guest.connection, frames.encode_reply(frames.REFUSED, 0, refusal))
            guest.connection.close()

    def _start(self, guest: _Guest, caller: frames.Caller) -> str:
        """Hand the connection to a receiver; returns "" or why it is refused. Raises OSError: no thread for it."""
        lane = self._lanes.lane(caller.attachment[0] + caller.number)
        welcome = frames.welcome(frames.key_of(self._token, caller.peer.epoch), guest.nonce, caller)
        receiver = Receiver(
            guest.connection, caller, welcome, lane, self._writers, self._limits, self._on_change, self._count_garbage
        )
        refusal = self._writers.admit_receiver(receiver)
        if not refusal:
            receiver.look_again()
        return refusal

    def _sweep(self) -> bool:
        latest = time.monotonic() - (min(PATIENCE_S, GREETING_S) if self._full else GREETING_S)
        for guest in [guest for guest in self._guests.values() if guest.since < latest]:
            self._release(guest)
            self._turn_away(guest)
        return bool(self._guests)

    def _release(self, guest: _Guest) -> None:
        self._loop.unwatch(guest.connection.fileno())
        del self._guests[guest.connection.fileno()]
        if self._full:
            self._full = False
            self._loop.watch(self._listener.fileno(), self._accept)

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
        if error.errno in OUT_OF_DESCRIPTORS:
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
