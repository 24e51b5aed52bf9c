"""Memory for KV caches that is quick to write to: on huge pages where the system gives them, or shared by a memfd.

An array that is simply allocated may lie on pages of 4 KiB; a write into those takes about twice as long as one into
huge pages. Memory that nobody has touched yet pays for its page faults in the middle of a transfer besides.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import resource
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError, PoolError
from kvferry.free_memory import free_memory

__all__ = ["KINDS", "Memory", "Pool", "allocate_pool", "make_present", "map_memfd", "page_bytes_at", "shared_pools"]

KINDS = ("private", "memfd")
ALIGNMENT = 2 << 20
_STEP_BYTES = 1 << 30
"""Pages are made present in steps, so that Ctrl-C is heard in between."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; not in the mmap module
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FAILED = ctypes.c_void_p(-1).value

Memory = ctypes.Array[ctypes.c_uint8]
"""Mapped bytes; they are unmapped when the last reference to the object goes."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_numbers = itertools.count()
_shared: dict[int, tuple[int, int, int]] = {}
"""Open memfd pools. Single operations on a dictionary are atomic; a lock could be held for ever in a forked child."""


class Pool:
    """A block of memory, zeroed, every page of it present. Made by `allocate_pool`; a context manager.

    numpy takes it as it is (`np.asarray(pool)`), and `KVArgs` too. Beyond its end lies an unmapped page.

    After a fork the child has a copy of a private pool and shares a memfd pool with its parent. Fork before the pool
    is made: afterwards the first write to each page of a private pool, in either process, is a page fault.

    Attributes:
        address: where it starts; a multiple of 2 MiB.
        nbytes: its size, as asked for.
        kind: "private" or "memfd".
        page_bytes: size of the pages that most of it lies on, by the kernel's word: 2097152 or 4096 on x86.
        fd: the memfd, which belongs to the pool; -1 if it is private or closed.
        is_closed: whether `close` was called.
    """

    def __init__(self, nbytes: int, kind: str) -> None:
        self.nbytes = nbytes
        self.kind = kind
        self.is_closed = False
        self._number = next(_numbers)
        self._was_lent = False
        mapped = _mapped_bytes(nbytes)
        self.fd = _memfd(mapped) if kind == "memfd" else -1
        try:
            memory = _map(nbytes, mapped, self.fd)
            self.address = ctypes.addressof(memory)
            _touch(self.address, mapped, self.fd)
        except BaseException:
            if self.fd >= 0:
                os.close(self.fd)
            raise
        self._memory: Memory | None = memory
        self.page_bytes = page_bytes_at(self.address)
        if self.fd >= 0:
            # the descriptor belongs to the memory: an array may outlive this object
            _shared[self._number] = (self.address, nbytes, self.fd)
            weakref.finalize(memory, _close_shared, self._number).atexit = False

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory as uint8[nbytes]. Raises PoolError when the pool is closed."""
        return np.frombuffer(memoryview(self._opened()), np.uint8)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """How numpy and `KVArgs` see it. Raises PoolError when the pool is closed."""
        self._opened()
        # whoever asks keeps this object and a bare address: from now on the memory has to live as long as the object
        self._was_lent = True
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def close(self) -> None:
        """Close the descriptor and give the memory back as soon as no array lies over it; may be called twice.

        Where the pool itself was handed to numpy or `KVArgs` the memory goes with the last reference to the pool.
        What was told nothing but the address must not use it any more.
        """
        self.is_closed = True
        self.fd = -1
        _close_shared(self._number)
        if not self._was_lent:
            self._memory = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.is_closed else ""
        return (
            f"<Pool {self.kind}, {self.nbytes} bytes at {self.address:#x}, "
            f"pages of {self.page_bytes >> 10} KiB{closed}>"
        )

    def _opened(self) -> Memory:
        if self._memory is None or self.is_closed:
            raise PoolError(f"the {self.kind} pool of {self.nbytes} bytes is closed", hint="make a new one")
        return self._memory


def allocate_pool(nbytes: int, *, kind: str = "private") -> Pool:
    """Allocate memory for a KV cache: aligned to 2 MiB, zeroed, every page present, on huge pages where there are any.

    Args:
        nbytes: size in bytes.
        kind: "private": anonymous memory of this process. "memfd": memory that peers on this host can be given a
            descriptor of, for the mechanism "shm" of the local engine; it has no name and goes with its last user.

    Returns:
        The pool; keep it for as long as its memory is used, or close it.

    Raises:
        InputError: nbytes is not a positive integer, or there is no such kind.
        PoolError: there is not so much memory, or a limit of the process forbids it.
    """
    try:
        size = nbytes.__index__()
    except (AttributeError, TypeError):
        raise InputError(f"a pool of {nbytes!r} bytes: that is no integer") from None
    if size <= 0:
        raise InputError(f"a pool of {size} bytes: its size must be above 0")
    if kind not in KINDS:
        raise InputError(f"no kind of pool is called {kind!r}", hint=f"one of {', '.join(KINDS)}")
    _check_fits(size, kind)
    try:
        return Pool(size, kind)
    except OSError as error:
        raise _refusal(size, kind, error) from error


def shared_pools() -> list[tuple[int, int, int]]:
    """List the open memfd pools of this process as (address, nbytes, fd). May be called by any thread."""
    return list(_shared.values())


def map_memfd(fd: int) -> Memory:
    """Map the whole memfd of a pool that another process has handed over; the descriptor may be closed afterwards.

    A forked child has no such mapping.

    Raises:
        PoolError: it is not sealed against shrinking, which would kill whoever touches it afterwards.
        OSError: it is no memfd, or can't be mapped.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PoolError(f"descriptor {fd} is not sealed: whoever handed it over could take its pages away")
    size = os.fstat(fd).st_size
    memory = _map(size, size, fd)
    # a child must not have it: the end of the process that mapped it is the proof that it is written no more
    if _libc.madvise(ctypes.addressof(memory), size, mmap.MADV_DONTFORK):
        raise _last_error()
    return memory


def make_present(address: int, nbytes: int) -> bool:
    """Have the kernel fill in the page tables of mapped memory, so that no later write waits for that.

    Returns:
        Whether it did; a kernel before 5.14 does not.
    """
    return not _libc.madvise(address, nbytes, _POPULATE_WRITE)


def page_bytes_at(address: int) -> int:
    """Size of the pages that most of the mapping at an address lies on; 0 where the system does not say.

    Reads /proc/self/smaps, for which the kernel walks all memory of the process: not for hot paths.
    """
    mapping = _mapping_at(address)
    in_huge = mapping.get("AnonHugePages", 0) + mapping.get("ShmemPmdMapped", 0)
    if in_huge and 2 * in_huge >= mapping["Size"]:
        return _huge_page_bytes()
    return mapping.get("KernelPageSize", 0)


def _mapping_at(address: int) -> dict[str, int]:
    """The fields of smaps, in bytes, of the mapping that an address lies in."""
    found: dict[str, int] = {}
    is_inside = False
    try:
        with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                name, *words = line.split()
                if not name.endswith(":"):  # the first line of a mapping: its addresses
                    if found:
                        break
                    start, _, end = name.partition("-")
                    is_inside = int(start, 16) <= address < int(end, 16)
                elif is_inside and words[-1:] == ["kB"]:
                    found[name[:-1]] = int(words[0]) << 10
    except OSError:
        return {}
    return found


def _huge_page_bytes() -> int:
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return ALIGNMENT


def _mapped_bytes(nbytes: int) -> int:
    # whole huge pages from one huge page on, so that the last part lies on one as well
    unit = ALIGNMENT if nbytes >= ALIGNMENT else mmap.PAGESIZE
    return -(-nbytes // unit) * unit


def _check_fits(nbytes: int, kind: str) -> None:
    """Refuse what would end this process, or a neighbour, while it is touched."""
    mapped, free = _mapped_bytes(nbytes), free_memory()
    if free is not None and mapped > free.nbytes - free.nbytes // 20:
        raise PoolError(
            f"a {kind} pool of {nbytes} bytes does not fit: {free.where} has {free.nbytes} bytes free, of which a "
            "twentieth is left to others",
            hint="ask for fewer pages, or give it more memory",
        )


def _close_shared(number: int) -> None:
    if number in _shared:
        os.close(_shared.pop(number)[2])


def _memfd(mapped: int) -> int:
    fd = os.memfd_create("kvferry-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mapped)
        # whoever maps it can be sure that no page of it goes away, which would be a SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _map(nbytes: int, mapped: int, fd: int) -> Memory:
    """Map memory at a multiple of 2 MiB, with unmapped pages on both sides; it goes when the returned object does.

    Without those pages the kernel merges neighbouring mappings, and smaps says nothing of this one alone.
    """
    whole = mapped + 2 * ALIGNMENT
    reserved = _mmap(0, whole, _PROT_NONE, _ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-(reserved + mmap.PAGESIZE) // ALIGNMENT) * ALIGNMENT
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    # not at exit: an engine's thread may still write then
    weakref.finalize(memory, _libc.munmap, reserved, whole).atexit = False
    flags = _MAP_FIXED | (mmap.MAP_SHARED if fd >= 0 else _ANONYMOUS)
    _mmap(address, mapped, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)
    _libc.madvise(address, mapped, mmap.MADV_HUGEPAGE)  # a wish: kernels without huge pages refuse it
    return memory


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address or None, nbytes, protection, flags, fd, 0)
    if found == _FAILED:
        raise _last_error()
    return int(found)


def _touch(address: int, mapped: int, fd: int) -> None:
    for start in range(address, address + mapped, _STEP_BYTES):
        length = min(_STEP_BYTES, address + mapped - start)
        if make_present(start, length):
            continue
        if ctypes.get_errno() != errno.EINVAL:
            raise _last_error()
        if fd >= 0:  # an older kernel: where a page can't be had, touching it would end the process by SIGBUS
            os.posix_fallocate(fd, start - address, length)
        page = (ctypes.c_uint8 * length).from_address(start)
        np.frombuffer(memoryview(page), np.uint8)[:: mmap.PAGESIZE] = 0


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _refusal(nbytes: int, kind: str, error: OSError) -> PoolError:
    number = error.errno or 0
    text = f"a {kind} pool of {nbytes} bytes can't be had: {errno.errorcode.get(number, number)} ({error.strerror})"
    limit, advice = _LIMITS.get(number, (-1, "see the system's log"))
    if limit >= 0:
        text += f"; the limit of this process is {resource.getrlimit(limit)[0]}"
    return PoolError(text, hint=advice)


_LIMITS = {
    errno.EFBIG: (resource.RLIMIT_FSIZE, "raise the limit on file sizes (ulimit -f), which holds for memfds"),
    errno.EMFILE: (resource.RLIMIT_NOFILE, "raise the limit on open files (ulimit -n)"),
    errno.ENOMEM: (resource.RLIMIT_AS, "raise the limit on address space (ulimit -v) or the container's memory"),
    errno.ENOSPC: (-1, "shared memory is full: free some, or raise the container's limit"),
    errno.EFAULT: (-1, "a page could not be had: free memory, or raise the container's limit"),
}
"""errno: the limit to show with its value, and what to do."""
