"""Windows of this process's memory, gathered by address: few by the kernel, many by numpy.

Numpy is ten times as fast, and the process dies of memory that its owner gives back meanwhile. The kernel says so.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.engines.seam import Region
from kvferry.errors import EngineError
from kvferry.layout.deal import I64
from kvferry.plan.batch import U64

_PAGE_BYTES = mmap.PAGESIZE
_REACH_BYTES = 1 << 50
"""Addresses of user space lie below (47, 48 or 52 bits; numpy bounds length times item)."""
_MS_ASYNC = 1
_WORDS = 8
_AT_ONCE = 1024
"""Windows whose cache lines are brought closer before they are read: 64 KiB of them."""
_FEW = 64

# keeps the interpreter: the call takes a microsecond
_msync = ctypes.PyDLL(None, use_errno=True).msync
_msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_process_vm_readv = ctypes.PyDLL(None, use_errno=True).process_vm_readv
_process_vm_readv.argtypes = (
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
)  # fmt: skip
_process_vm_readv.restype = ctypes.c_ssize_t
_IOV_MAX = 1024
_KEEP = "keep pools until the manager is shut down, or replace them with update_buffers"


Read = Callable[[I64, int], npt.NDArray[np.void]]
"""Takes addresses and a length; gives what lies there."""


class _Memory:
    """All of the address space, as overlapping items: item i are the nbytes bytes at address _PAGE_BYTES + i."""

    def __init__(self, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "shape": (_REACH_BYTES,), "typestr": f"|V{nbytes}", "data": (_PAGE_BYTES, True), "strides": (1,),
            "version": 3,
        }  # fmt: skip


@functools.cache
def _items(nbytes: int) -> npt.NDArray[np.void]:
    return np.asarray(_Memory(nbytes))


class Mapped:
    """Registered memory, and whether it is there still."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = [region for region in regions if region.nbytes]
        pages = [region.address // _PAGE_BYTES * _PAGE_BYTES for region in self._regions]
        self._spans = [
            (page, each.address + each.nbytes - page) for page, each in zip(pages, self._regions, strict=True)
        ]
        half = _IOV_MAX // 2
        self._looks = [_Look(self._regions[begin : begin + half]) for begin in range(0, len(self._regions), half)]

    def check(self) -> None:
        """Refuse to read memory that its owner has given back: the process would die of it.

        Raises:
            EngineError: a region is not mapped any more, or can't be read, with its address.
        """
        for number, (page, nbytes) in enumerate(self._spans):
            if _msync(page, nbytes, _MS_ASYNC):
                raise _gone(self._regions[number], "is not mapped any more")
        # something else may be mapped there by now, such as what an allocator or a thread's stack keeps in reserve
        for look in self._looks:
            region = look.first_unreadable()
            if region is not None:
                raise _gone(region, "can't be read any more")


class _Look:
    """One system call that reads the first and the last byte of each region."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        ends = [(end, 1) for each in regions for end in (each.address, each.address + each.nbytes - 1)]
        self._there = np.array(ends, np.uint64)
        self._bytes = np.empty(len(ends), np.uint8)
        self._here = np.array([[self._bytes.ctypes.data, len(ends)]], np.uint64)
        self._arguments = self._here.ctypes.data, 1, self._there.ctypes.data, len(ends), 0

    def first_unreadable(self) -> Region | None:
        read = int(_process_vm_readv(os.getpid(), *self._arguments))
        if read == len(self._there) or (read < 0 and ctypes.get_errno() != errno.EFAULT):
            return None  # or the system does not let this process look
        return self._regions[max(read, 0) // 2]


def _gone(region: Region, why: str) -> EngineError:
    return EngineError(
        f"registered memory of {region.nbytes} bytes at {region.address:#x} {why}",
        hint=_KEEP,
    )


def read(addresses: I64, nbytes: int) -> npt.NDArray[np.void]:
    """void[N] of nbytes bytes each: what lies at the addresses, which must be mapped."""
    return np.asarray(_items(nbytes)[addresses - _PAGE_BYTES])


class _Asked(threading.local):
    """What the kernel is told: a set for each thread, since making it takes longer than the call."""

    def __init__(self) -> None:
        self.there = np.empty((_IOV_MAX, 2), np.uint64)
        self.here = np.empty((1, 2), np.uint64)
        self.arguments = self.here.ctypes.data, 1, self.there.ctypes.data
        self.in_use = False

    def read(self, at: int, addresses: I64, nbytes: int) -> int:
        """Have windows copied to an address; how many bytes were, or below 0."""
        count = len(addresses)
        self.in_use = True
        try:
            self.there[:count, 0], self.there[:count, 1] = addresses, nbytes
            self.here[0] = at, count * nbytes
            return int(_process_vm_readv(os.getpid(), *self.arguments, count, 0))
        finally:
            self.in_use = False


_asked = _Asked()


def read_few(addresses: I64, nbytes: int) -> npt.NDArray[np.void] | None:
    """The same, where the memory may be gone; half a microsecond for each.

    Returns:
        None where the system does not let a process look at itself so.

    Raises:
        EngineError: it is gone, or can't be read, with the address.
    """
    found = np.empty(len(addresses) * nbytes, np.uint8)
    at = int(found.__array_interface__["data"][0])  # half of what `ctypes.data` takes
    asked = _Asked() if _asked.in_use else _asked  # a signal handler of the application may poll in the middle of it
    for begin in range(0, len(addresses), _IOV_MAX):
        some = addresses[begin : begin + _IOV_MAX]
        got = asked.read(at + begin * nbytes, some, nbytes)
        if got < 0 and ctypes.get_errno() != errno.EFAULT:
            return None
        if got < len(some) * nbytes:
            address = int(addresses[begin + max(got, 0) // nbytes])
            raise EngineError(f"registered memory at {address:#x} can't be read any more", hint=_KEEP)
    return found.view(_kind(nbytes))


@functools.cache
def _kind(nbytes: int) -> np.dtype[np.void]:
    return np.dtype(f"V{nbytes}")


def _touch(addresses: I64) -> None:
    """Bring the first cache line of each place closer.

    A loop over single bytes waits for many lines at once, the one that copies windows for one after the other: both
    together take little more than half of the time of the second alone.
    """
    _items(1)[addresses - _PAGE_BYTES]


def read_many(addresses: I64, nbytes: int) -> npt.NDArray[np.void]:
    """The same as `read`, where windows are cache lines."""
    if nbytes != _WORDS * 8 or len(addresses) <= _FEW:
        return read(addresses, nbytes)
    found = np.empty(len(addresses), f"V{nbytes}")
    for begin in range(0, len(addresses), _AT_ONCE):
        some = addresses[begin : begin + _AT_ONCE]
        _touch(some)
        found[begin : begin + _AT_ONCE] = read(some, nbytes)
    return found


def words(found: npt.NDArray[np.void], nbytes: int) -> U64:
    """uint64[N, 8]: windows of up to 64 bytes, padded with zeros."""
    if nbytes == _WORDS * 8:
        return found.view(np.uint64).reshape(-1, _WORDS)
    padded = np.zeros((len(found), _WORDS * 8), np.uint8)
    padded[:, :nbytes] = found.view(np.uint8).reshape(-1, nbytes)
    return padded.view(np.uint64)
