"""The library's sockets, seen from outside: it says nothing of them itself."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED, _FIN_WAIT1, _LAST_ACK, _CLOSING = "01", "04", "09", "0B"
_NOT_ACKNOWLEDGED = {_FIN_WAIT1, _LAST_ACK, _CLOSING}
_NO_OWNER = "0"

_looking = threading.Lock()
"""Whoever looks through this process's sockets has duplicates of them, which nobody else must take for another's."""


def listening_ports() -> set[int]:
    """The TCP ports that this process listens on."""
    with _looking:
        return {port for port, _ in _listeners()}


def wake_listener(port: int) -> None:
    """Let the accept loop of a listener of this process go round without waiting.

    The destructor of the library's engine waits for its accept loop, which looks up once in a second, and holds
    Python's lock meanwhile: all threads of the process would stand still. The listener is made non-blocking, and a
    connection that is closed at once ends the wait that is on.
    """
    with _looking:
        for found, listener in _listeners():
            if found == port:
                listener.setblocking(False)  # its descriptor is a duplicate; the flag is the socket's
                host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
                with contextlib.suppress(OSError):
                    socket.create_connection((host, port), 1.0).close()


def held(ports: Collection[int]) -> dict[int, socket.socket]:
    """Duplicates of this process's listeners at these ports, which stay taken when the library closes its own.

    Binding anew afterwards would fail for a minute, while the kernel remembers connections that were closed there.
    """
    with _looking:
        return {port: each.dup() for port, each in _listeners() if port in ports}


def refuse(listener: socket.socket) -> bool:
    """Listen no more: whoever connects is refused, and the port stays taken as long as this is open.

    Returns:
        False, and nothing was done, if another descriptor of this process holds it still: it is not the library's.
    """
    mine = listener.fileno()
    inode = os.fstat(mine).st_ino
    with _looking:
        others = [int(name) for name in os.listdir("/proc/self/fd") if int(name) != mine]
        if any(_inode(fd) == inode for fd in others):
            return False
    with contextlib.suppress(OSError):  # the library has shut it down
        listener.shutdown(socket.SHUT_RDWR)
    return True


def unacknowledged(ports: Collection[int]) -> bool | None:
    """Whether bytes of closed connections to these ports of any host are still under way in this system's kernel.

    A connection whose end the other system has acknowledged has had all its bytes acknowledged.

    Returns:
        None where the kernel does not say.
    """
    found = _connections()
    if found is None:
        return None
    return any(
        each.state in _NOT_ACKNOWLEDGED and each.inode == _NO_OWNER and each.remote_port in ports for each in found
    )


def has_connections(ports: Collection[int]) -> bool | None:
    """Whether there are connections at these ports of this system; None where the kernel does not say."""
    found = _connections()
    if found is None:
        return None
    return any(each.state == _ESTABLISHED and each.local_port in ports for each in found)


class _Connection(NamedTuple):
    local_port: int
    remote_port: int
    state: str
    inode: str


def _connections() -> list[_Connection] | None:
    """The kernel's TCP sockets, of all processes of this network namespace."""
    try:
        lines = [line.split() for table in _TABLES for line in _read(table)]
    except OSError:
        return None
    return [_Connection(_port(line[1]), _port(line[2]), line[3], line[9]) for line in lines]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _read(table: str) -> list[str]:
    path = Path(table)
    # a system without IPv6 has one table only
    return path.read_text(encoding="ascii").splitlines()[1:] if path.exists() or table == _TABLES[0] else []


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    """Port and a duplicate of each listening TCP socket of this process; closed when the next one is asked for."""
    seen: set[int] = set()  # a descriptor that was closed meanwhile may be a duplicate of an earlier one by now
    for name in os.listdir("/proc/self/fd"):
        each = _duplicate(int(name))
        if each is None:
            continue
        with each:
            inode = os.fstat(each.fileno()).st_ino
            if inode not in seen and each.family in {socket.AF_INET, socket.AF_INET6} and _listens(each):
                seen.add(inode)
                yield int(each.getsockname()[1]), each


def _duplicate(fd: int) -> socket.socket | None:
    try:
        copy = os.dup(fd)
    except OSError:  # closed meanwhile
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None


def _inode(fd: int) -> int | None:
    """Of a socket; None for all else."""
    with contextlib.suppress(OSError):  # closed meanwhile
        status = os.fstat(fd)
        return status.st_ino if stat.S_ISSOCK(status.st_mode) else None
    return None


def _listens(each: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return each.type == socket.SOCK_STREAM and bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False
