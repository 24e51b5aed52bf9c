"""Windows of this process's memory, gathered by address in one numpy call."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
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


def check_mapped(regions: Sequence[Region]) -> None:
    """Refuse to read memory that its owner has given back: the process would die of it.

    Raises:
        EngineError: a region is not mapped any more, with its address.
    """
    for region in regions:
        begin = region.address // _PAGE_BYTES * _PAGE_BYTES
        if _msync(begin, region.address + region.nbytes - begin, _MS_ASYNC):
            raise EngineError(
                f"registered memory of {region.nbytes} bytes at {region.address:#x} is not mapped any more",
                hint="keep pools until the manager is shut down, or replace them with update_buffers",
            )


def read(addresses: I64, nbytes: int) -> npt.NDArray[np.void]:
    """void[N] of nbytes bytes each: what lies at the addresses, which must be mapped."""
    return np.asarray(_items(nbytes)[addresses - _PAGE_BYTES])


def _touch(addresses: I64) -> None:
    """Bring the first cache line of each place closer.

    A loop over single bytes waits for many lines at once, the one that copies windows for one after the other: both
    together take little more than half of the time of the second alone.
    """
    _items(1)[addresses - _PAGE_BYTES]


def read_words(addresses: I64, nbytes: int) -> U64:
    """uint64[N, 8]: up to 64 bytes at each address, padded with zeros."""
    if nbytes == _WORDS * 8:
        found = np.empty(len(addresses), f"V{nbytes}")
        for begin in range(0, len(addresses), _AT_ONCE):
            some = addresses[begin : begin + _AT_ONCE]
            if len(some) > _FEW:
                _touch(some)
            found[begin : begin + _AT_ONCE] = read(some, nbytes)
        return found.view(np.uint64).reshape(-1, _WORDS)
    found = read(addresses, nbytes)
    padded = np.zeros((len(found), _WORDS * 8), np.uint8)
    padded[:, :nbytes] = found.view(np.uint8).reshape(-1, nbytes)
    return padded.view(np.uint64)
