"""An epoll for threads that must not lose the interpreter by asking."""

from __future__ import annotations

import ctypes
import platform
import select

_READY_AT_ONCE = 64


class _Event(ctypes.Structure):
    _pack_ = 1 if platform.machine() == "x86_64" else 8  # epoll_event is packed on x86-64 alone
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


class Epoll:
    """An epoll that is asked without giving up the interpreter.

    select.epoll releases the GIL even when it does not wait, and a thread beside that computes in Python gives it
    back only a switch interval (5 ms) later.
    """

    _wait = ctypes.PyDLL(None).epoll_wait

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._events = (_Event * _READY_AT_ONCE)()
        self._first = (_Event * 1)()
        self._fd = self._epoll.fileno()

    def fileno(self) -> int:
        """The epoll's own descriptor."""
        return self._fd

    def add(self, fd: int) -> None:
        """Watch a descriptor for input."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Watch it no more."""
        self._epoll.unregister(fd)

    def any(self) -> bool:
        """Whether one is ready; any thread may ask."""
        return int(self._wait(self._fd, self._first, 1, 0)) > 0

    def ready(self) -> list[int]:
        """Those that are ready, some of them if they are many; for the owner."""
        count = int(self._wait(self._fd, self._events, _READY_AT_ONCE, 0))
        return [int(self._events[number].data) & 0xFFFFFFFF for number in range(count)]

    def close(self) -> None:
        """Close it; `any` is false from then on, or harmlessly wrong."""
        self._fd = -1
        self._epoll.close()
