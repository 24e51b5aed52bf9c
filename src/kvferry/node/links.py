"""The control plane's sockets: one bound ROUTER, one DEALER per dialled peer. Used by one thread at a time.

A dialled connection is watched through its own monitor, an accepted one through ROUTER_MANDATORY: sending to a
peer that is gone fails at once. Heartbeats are libzmq's own, which runs in C: a process that holds the GIL for
seconds stays connected, a stopped or killed one is noticed. Nothing here ever blocks or reconnects.

libzmq's descriptor of a socket says that it has something to do, once: what a send does on the way is not said
again. Sockets that may hold frames after a send, or after a burst, are therefore carried over to the next `take`.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.errors import AddressError
from kvferry.node.epoll import Epoll
from kvferry.wire.codec import MAX_FRAME_BYTES

MAX_SOCKETS = 16384
BURST = 256
"""Frames taken from one socket before the others have their turn."""

_MORE = zmq.NOBLOCK | zmq.SNDMORE
_POLLIN = int(zmq.POLLIN)
_UNSPOKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_UNSPOKEN |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_LOST |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Link:
    """One connection; `address` is for texts."""

    def __init__(self, address: str) -> None:
        self.address = address


class Accepted(Link):
    """A connection that the other side made."""

    def __init__(self, routing_id: bytes) -> None:
        super().__init__(f"accepted {routing_id.hex()}")
        self.routing_id = routing_id


class Dialled(Link):
    """A connection that this side made; `numeric` is where `address` led."""

    def __init__(self, address: str, numeric: str, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        super().__init__(address)
        self.numeric = numeric
        self.socket = socket
        self.monitor = monitor


class Received(NamedTuple):
    """A frame, or, with data None, the news that the connection is gone."""

    link: Link
    data: bytes | None


class Links:
    """All connections of a node, and the descriptor that wakes its thread.

    Attributes:
        port: the port that is bound.
        unspoken: connections that ended before they had spoken ZMTP; checks of reachability are among them.
    """

    def __init__(self, host: str, ports: tuple[int, int], heartbeat_s: float, timeout_s: float) -> None:
        self._heartbeat_ms, self._timeout_ms = int(heartbeat_s * 1000), int(timeout_s * 1000)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._by_fd: dict[int, zmq.Socket[bytes]] = {}
        self._dialled: dict[zmq.Socket[bytes], Dialled] = {}
        self._accepted: dict[bytes, Accepted] = {}
        self._carried: set[zmq.Socket[bytes]] = set()
        self._news = Epoll()
        self._wake_lock = threading.RLock()  # a signal handler may shut the node down inside of it
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # the wake-up is no news: whoever takes the news must not take it from the thread that it is meant for
        self._sleep = select.epoll()
        self._sleep.register(self._wake, select.EPOLLIN)
        self._sleep.register(self._news.fileno(), select.EPOLLIN)
        self._deaf = select.epoll()
        self._deaf.register(self._wake, select.EPOLLIN)
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._doorbell = self._router.get_monitor_socket(_UNSPOKEN)
        self.unspoken = 0
        try:
            self.port = self._bind(host, ports)
        except BaseException:
            self.close()
            raise
        self._watch(self._router)
        self._watch(self._doorbell)

    # -- any thread

    def wake(self) -> None:
        """Make a running or the next `wait` return."""
        with self._wake_lock:  # close() may run at the same time; a reused descriptor is not ours to write
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def has_news(self) -> bool:
        """Whether `take` would find something. Costs a microsecond and keeps the interpreter."""
        return bool(self._carried) or self._news.any()

    def wait(self, timeout_s: float, *, for_news: bool = True) -> None:
        """Sleep until there is a wake-up, or news; for one thread, which need not own the sockets meanwhile."""
        if not for_news:
            if self._deaf.poll(timeout_s):
                _drain(self._wake)
        elif not self._carried and self._sleep.poll(timeout_s):
            _drain(self._wake)

    # -- the owner

    def dial(self, address: str, numeric: str, routing_id: bytes) -> Dialled:
        """Begin to connect to "tcp://host:port", whose numeric form is known.

        Raises:
            AddressError: libzmq does not take the address, or has no socket left.
        """
        socket = None
        try:
            socket = self._socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, routing_id)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            monitor = socket.get_monitor_socket(_LOST)
            link = Dialled(address, numeric, socket, monitor)
            self._dialled[socket] = self._dialled[monitor] = link
            self._watch(socket)
            self._watch(monitor)
            socket.connect(numeric)
        except zmq.ZMQError as error:
            if socket in self._dialled:
                self.drop(self._dialled[socket])
            elif socket is not None:
                socket.close(0)
            raise AddressError(f"no connection to {address} ({numeric}) can be made: {error}") from None
        return link

    def send(self, link: Link, data: bytes) -> bool:
        """Hand a frame to a connection; False if the connection is gone. A full queue drops the frame."""
        socket = link.socket if isinstance(link, Dialled) else self._router
        try:
            if isinstance(link, Accepted):
                socket.send(link.routing_id, _MORE)
                socket.send(data, zmq.NOBLOCK)
            else:
                socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        finally:
            if _has_input(socket):  # also of a send that failed: it may have taken the word of another's first frame
                self._carried.add(socket)
        return True

    def take(self, burst: int = BURST) -> Iterator[Received]:
        """Frames and news that are there, at most `burst` frames of a connection; to be read to its end."""
        ready = self._carried.union(self._by_fd[fd] for fd in self._news.ready() if fd in self._by_fd)
        self._carried = set()
        for item in ready:
            if item is self._router:
                yield from self._from_router(burst)
            elif item is self._doorbell:
                self._count_unspoken()
            elif item in self._dialled:
                yield from self._from_dialled(item, self._dialled[item], burst)

    def drop(self, link: Link) -> None:
        """Close a connection that this side made; forget one that the other side made."""
        if isinstance(link, Accepted):
            self._accepted.pop(link.routing_id, None)
        elif isinstance(link, Dialled) and link.socket in self._dialled:
            for socket in (link.socket, link.monitor):
                self._unwatch(socket)
                del self._dialled[socket]
            link.socket.disable_monitor()
            link.monitor.close(0)
            link.socket.close(200)

    def close(self) -> None:
        """Close everything; frames that were handed over have 0.2 s to leave."""
        for link in set(self._dialled.values()):
            self.drop(link)
        self._router.disable_monitor()
        self._unwatch(self._doorbell)
        self._unwatch(self._router)
        self._doorbell.close(0)
        self._router.close(200)
        self._context.term()
        self._sleep.close()
        self._deaf.close()
        self._news.close()
        with self._wake_lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    # -- helpers

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        fd = int(socket.getsockopt(zmq.FD))
        self._by_fd[fd] = socket
        self._news.add(fd)
        self._carried.add(socket)  # a socket that was never read from does not say that it has something

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        self._carried.discard(socket)
        fd = next((fd for fd, watched in self._by_fd.items() if watched is socket), None)
        if fd is not None:
            del self._by_fd[fd]
            self._news.remove(fd)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, self._timeout_ms)
        socket.setsockopt(zmq.HEARTBEAT_IVL, self._heartbeat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._timeout_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, max(100, self._timeout_ms // 100 * 100))
        return socket

    def _bind(self, host: str, ports: tuple[int, int]) -> int:
        bracketed = f"[{host}]" if ":" in host else host
        last: zmq.ZMQError | None = None
        for port in range(ports[0], ports[1] + 1):
            try:
                self._router.bind(f"tcp://{bracketed}:{port or '*'}")
            except zmq.ZMQError as error:
                last = error
                continue
            endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            return int(endpoint.decode().rstrip("\0").rpartition(":")[2])
        raise AddressError(
            f"control plane: cannot bind {host} port {ports[0]}{f'-{ports[1]}' if ports[1] > ports[0] else ''}: {last}",
            hint="choose a free port or range (control_ports), or 0; check that the address is one of this host",
        )

    def _count_unspoken(self) -> None:
        while self._doorbell.poll(0):
            recv_monitor_message(self._doorbell, zmq.NOBLOCK)
            self.unspoken += 1

    def _from_router(self, burst: int) -> Iterator[Received]:
        for _ in range(burst):
            parts = _next(self._router)
            if parts is None:
                return
            routing_id = parts[0]
            link = self._accepted.get(routing_id)
            if link is None:
                link = self._accepted[routing_id] = Accepted(routing_id)
            yield Received(link, parts[1] if len(parts) == 2 else b"".join(parts[1:]) + b"multipart")
        self._carried.add(self._router)

    def _from_dialled(self, item: zmq.Socket[bytes], link: Dialled, burst: int) -> Iterator[Received]:
        ended = item is link.monitor and self._monitored(link)
        yield from self._frames(link, BURST if ended else burst)  # what came before the end is still heard
        if ended:
            yield Received(link, None)

    @staticmethod
    def _monitored(link: Dialled) -> bool:
        try:
            recv_monitor_message(link.monitor, zmq.NOBLOCK)
        except zmq.Again:  # its descriptor also speaks of commands that bring no event
            return False
        return True

    def _frames(self, link: Dialled, burst: int) -> Iterator[Received]:
        for _ in range(burst):
            if link.socket.closed:  # dropped by whoever took the frame before
                return
            parts = _next(link.socket)
            if parts is None:
                return
            yield Received(link, parts[0] if len(parts) == 1 else b"".join(parts) + b"multipart")
        if not link.socket.closed:
            self._carried.add(link.socket)


def _next(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The parts of the next frame, if there is one."""
    try:
        # asked first, since an exception takes longer than to receive a frame
        return socket.recv_multipart(zmq.NOBLOCK) if _has_input(socket) else None
    except zmq.Again:
        return None


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _drain(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except (BlockingIOError, OSError):
        return
