"""What is on its way into this process by TCP, as the kernel says: the library says nothing of its sockets."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")

_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2, _SYN_RECV = 1, 4, 5, 3
_MAY_RECEIVE = {_ESTABLISHED, _SYN_RECV, _FIN_WAIT1, _FIN_WAIT2}
_CLOSE_WAIT, _LISTEN = 8, 10
_NOT_ACCEPTED = {_ESTABLISHED, _SYN_RECV, _CLOSE_WAIT}
_RECEIVED_AT = 128  # tcpi_bytes_received in struct tcp_info
_INFO_BYTES = _RECEIVED_AT + 8
_CLOSED_MEANWHILE = {errno.ENOENT, errno.EBADF, errno.ENOTSOCK}
_MAPPED = b"\0" * 10 + b"\xff\xff"

End = tuple[bytes, int]
"""Address and port."""

Address = tuple[Any, ...]
"""As Python's sockets have it."""

Marks = dict[int, int | None]
"""By socket: how much has to be read from it; None where that is not known yet."""


class Connection(NamedTuple):
    """A TCP socket of this process.

    Attributes:
        inode: what it is known by; unlike the descriptor it is not used again at once.
        here: this end.
        there: the other end; None when it is connected no more.
        host: the other end's address as the system writes it, with what belongs to it.
        state: as the kernel numbers them.
        received: bytes that have ever come; 0 where the kernel does not count them.
        unread: bytes that have come and were not read.
    """

    inode: int
    here: End
    there: End | None
    host: tuple[int, Address]
    state: int
    received: int
    unread: int

    @property
    def may_receive(self) -> bool:
        """Whether the other end has not yet finished what it sends."""
        return self.state in _MAY_RECEIVE


def may_land(marks: Marks) -> Marks:
    """Of these sockets, those that may still hold, or be sent, bytes of a process of this host that has ended.

    That process writes nothing any more. So a socket is done with once so much was read from it as its other end had
    ever been given; or once it is seen that the other end has all its bytes acknowledged, and then that all that has
    come was read. What comes later is of others. A descriptor that was closed is read by nobody, and sockets of a
    process of another host are none of the process's.

    Args:
        marks: by socket, as the last look gave them; None at first.

    Raises:
        OSError: the kernel does not say.
    """
    # the order counts: first what the senders have, then what has come
    sent = unacknowledged()
    mine = list(_connections())
    ends = {(each.here, each.there) for each in mine}
    left: Marks = {}
    for each in mine:
        if each.inode in marks:
            waiting = None if each.there is None else sent.get((each.there, each.here))
            mark = marks[each.inode]
            if mark is None and waiting is not None:
                mark = each.received + waiting  # or more than it was: what came in between is counted twice
            if (each.there, each.here) not in ends and _is_on_its_way(each, waiting, mark):
                left[each.inode] = mark
    return left


def own_sockets() -> Marks:
    """The TCP sockets of this process, with no mark yet."""
    return dict.fromkeys(each.inode for each in _connections())


def unacknowledged() -> dict[tuple[End, End], int]:
    """Bytes, of each connected TCP socket of this network namespace, that its other end has not acknowledged.

    Raises:
        OSError: the kernel does not say.
    """
    return {(row.here, row.there): row.unacknowledged for row in _table()}


def awaits_acceptance() -> bool:
    """Whether somebody has connected to a socket that this process listens on, and was not accepted yet.

    Bytes may have come with it, and the library will read them when it accepts.

    Raises:
        OSError: the kernel does not say.
    """
    ports = {each.here[1] for each in _sockets() if each.state == _LISTEN}
    return any(not row.inode and row.state in _NOT_ACCEPTED and row.here[1] in ports for row in _table())


class _Row(NamedTuple):
    here: End
    there: End
    state: int
    unacknowledged: int
    inode: int


def _table() -> Iterator[_Row]:
    for table in TABLES:
        # a system without IPv6 has one table only
        if table == TABLES[0] or Path(table).exists():
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                _, here, there, state, queues, _, _, _, _, inode = line.split()[:10]
                yield _Row(_end(here), _end(there), int(state, 16), int(queues.partition(":")[0], 16), int(inode))


def _is_on_its_way(each: Connection, waiting: int | None, mark: int | None) -> bool:
    """Whether something of before the first look may be; not asked where both ends are this process's."""
    if each.there is None or not each.may_receive:
        return each.unread > 0
    if mark is not None and each.received - each.unread >= mark:
        return False
    if waiting is None:
        # the table is no snapshot: an end on this host may be missing in it by chance
        return _is_of_this_host(each)
    return waiting > 0 or each.unread > 0


def _is_of_this_host(each: Connection) -> bool:
    """Whether the other end's address is one of this host's: only to those a socket can be bound."""
    family, address = each.host
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((address[0], 0, *address[2:]))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _connections() -> Iterator[Connection]:
    return (each for each in _sockets() if each.state != _LISTEN)


def _sockets() -> Iterator[Connection]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                found = _seen(each)
        except OSError as error:
            if error.errno not in _CLOSED_MEANWHILE:
                raise  # what can't be looked at must not count as gone
            continue
        if found is not None:
            yield found


def _seen(each: socket.socket) -> Connection | None:
    if each.family not in {socket.AF_INET, socket.AF_INET6} or each.proto != socket.IPPROTO_TCP:
        return None
    here: Address = each.getsockname()
    try:
        there: Address | None = each.getpeername()
    except OSError:
        there = None
    # the order counts: once the other end has finished, nothing is added to what is unread
    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    state = info[0]
    (received,) = struct.unpack_from("Q", info, _RECEIVED_AT) if len(info) == _INFO_BYTES else (0,)
    waiting = fcntl.ioctl(each.fileno(), termios.FIONREAD, b"\0" * 4) if state != _LISTEN else b"\0" * 4
    (unread,) = struct.unpack("i", waiting)
    return Connection(
        os.fstat(each.fileno()).st_ino, _packed(each, here), _packed(each, there) if there else None,
        (each.family, there or here), state, received, unread,
    )  # fmt: skip


def _packed(each: socket.socket, address: Address) -> End:
    return _plain(socket.inet_pton(each.family, address[0].partition("%")[0])), int(address[1])


def _end(text: str) -> End:
    """An end as the tables write it: words of 32 bits in this machine's order, then the port."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
    return _plain(b"".join(words)), int(port, 16)


def _plain(address: bytes) -> bytes:
    """An IPv4 address that is written as one of IPv6, as IPv4 has it."""
    return address.removeprefix(_MAPPED) if len(address) == 16 else address
