"""The few Linux calls that Python lacks or does row by row, on iovec arrays; each releases the GIL."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable
from typing import cast

from kvferry.plan.batch import U64

_SO_PEERPIDFD = 77  # not in the socket module; Linux 6.5 and later
_libc = ctypes.CDLL(None, use_errno=True)


class _MessageHeader(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_Call = Callable[..., int]


def _function(name: str, *argument_types: object) -> _Call | None:
    function = getattr(_libc, name, None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        function.argtypes = argument_types
    return cast("_Call | None", function)


_VM_ARGUMENTS = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_process_vm_writev = _function("process_vm_writev", *_VM_ARGUMENTS)
_process_vm_readv = _function("process_vm_readv", *_VM_ARGUMENTS)
_sendmsg = _function("sendmsg", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_recvmsg = _function("recvmsg", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def write_memory(pid: int, here: U64, there: U64) -> int:
    """Copy from this process into another (process_vm_writev).

    Args:
        pid: the other process, or this one.
        here: uint64[N, 2] iovecs in this process.
        there: uint64[M, 2] iovecs in the other one.

    Returns:
        Bytes copied: at most the smaller sum; fewer when a later byte could not be written.

    Raises:
        OSError: nothing was copied; EPERM, ESRCH, EFAULT, ENOSYS, ...
    """
    return _process_vm(_process_vm_writev, "process_vm_writev", pid, here, there)


def read_memory(pid: int, here: U64, there: U64) -> int:
    """Copy from another process into this one (process_vm_readv); see `write_memory`."""
    return _process_vm(_process_vm_readv, "process_vm_readv", pid, here, there)


def send_vectors(fd: int, vectors: U64) -> int:
    """Send from memory without waiting and without SIGPIPE; returns bytes taken, raises OSError."""
    return _message(_sendmsg, fd, vectors, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive_vectors(fd: int, vectors: U64) -> int:
    """Receive into memory without waiting; returns bytes, 0 at the end of the stream, raises OSError."""
    return _message(_recvmsg, fd, vectors, socket.MSG_DONTWAIT)


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end of a Unix socket, as the kernel knows them (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def peer_pidfd(connection: socket.socket, pid: int) -> int:
    """A descriptor for the process at the other end of a Unix socket; readable when that process has ended.

    Without SO_PEERPIDFD the number may have been used again by the time it is opened: the caller must hear
    from the other end afterwards, which proves that the process still lived.

    Raises:
        OSError: the process has ended, or this kernel has no pidfds.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(pid)


def error_name(error: OSError) -> str:
    """The errno's name ("EPERM"), or its number as text."""
    return errno.errorcode.get(error.errno, str(error.errno)) if error.errno is not None else "unknown"


def _process_vm(function: _Call | None, name: str, pid: int, here: U64, there: U64) -> int:
    if function is None:
        raise OSError(errno.ENOSYS, f"this system has no {name}")
    count = function(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
    return _checked(count)


def _message(function: _Call | None, fd: int, vectors: U64, flags: int) -> int:
    assert function is not None, "every libc has sendmsg and recvmsg"
    header = _MessageHeader(iov=vectors.ctypes.data, iov_length=len(vectors))
    count = function(fd, ctypes.addressof(header), flags)
    return _checked(count)


def _checked(count: int) -> int:
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count
