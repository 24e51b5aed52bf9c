"""The target's shared memory as the writer has it mapped, and the way from its addresses to ours."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence

import numpy as np

from kvferry.engines.intervals import Intervals
from kvferry.engines.local.frames import Part
from kvferry.errors import WireError
from kvferry.plan.batch import U64
from kvferry.pool import Memory, make_present, map_memfd

_STEP_BYTES = 32 << 20
"""Page tables are filled in steps of some milliseconds, so that `close` is heard in between."""


class SharedMap:
    """Grows by `add` until `complete`; then it translates. The memory is unmapped soon after `close`."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], Memory] = {}
        self._found: list[tuple[int, int, int]] = []
        self._shared = Intervals.none()
        self._moves = np.zeros(0, np.uint64)
        self._closed = threading.Event()

    def add(self, parts: Sequence[Part], fds: Sequence[int]) -> None:
        """Map files that the target has sent; those that were mapped already are recognised.

        Args:
            parts: pieces of the target's memory, each with the number of its file among fds.
            fds: memfds; they stay the caller's.

        Raises:
            WireError: a part names no file, or more than the file has.
            PoolError, OSError: a file can't be mapped.
        """
        for part in parts:
            if not part.file < len(fds):
                raise WireError(f"the peer shares file {part.file} of {len(fds)}")
            memory = self._mapped(fds[part.file])
            if part.offset + part.nbytes > len(memory):
                raise WireError(
                    f"the peer shares {part.nbytes} bytes at {part.offset} of a file of {len(memory)} bytes"
                )
            self._found.append((part.address, part.nbytes, ctypes.addressof(memory) + part.offset))

    def complete(self) -> None:
        """All parts are there; from now on page tables are filled in the background."""
        starts, sizes, ours = np.array(sorted(self._found), np.uint64).reshape(-1, 3).T
        self._shared, self._moves = Intervals(starts, starts + sizes), ours - starts
        memories = list(self._files.values())
        with contextlib.suppress(RuntimeError):  # no thread can be had: the first writes take page faults
            threading.Thread(target=self._fill, args=(memories,), name="kvferry-local-fill", daemon=True).start()

    def here(self, addresses: U64, nbytes: U64) -> tuple[U64, int | None]:
        """Translate rows in the target's memory.

        Args:
            addresses: uint64[N] where each row starts there.
            nbytes: uint64[N] its length.

        Returns:
            uint64[N] where each starts here, and the number of the first row that lies in no part, or None: if it is
            not None the addresses mean nothing.
        """
        outside = self._shared.first_outside(addresses, nbytes)
        if outside is not None:
            return addresses, outside
        if len(self._moves) == 1:
            return addresses + self._moves[0], None
        home = np.searchsorted(self._shared.starts, addresses, side="right") - 1
        # a difference of addresses may be negative: modulo 2**64 the sum is right all the same
        return addresses + self._moves[home], None

    def close(self) -> None:
        """Let the mappings go; may be called twice."""
        self._closed.set()
        self._files.clear()
        self._shared = Intervals.none()

    def _mapped(self, fd: int) -> Memory:
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        if key not in self._files:
            self._files[key] = map_memfd(fd)
        return self._files[key]

    def _fill(self, memories: list[Memory]) -> None:
        # without this the first write to each page would be a page fault, with the interpreter lock held
        for memory in memories:
            address, nbytes = ctypes.addressof(memory), len(memory)
            for start in range(0, nbytes, _STEP_BYTES):
                if self._closed.is_set() or not make_present(address + start, min(_STEP_BYTES, nbytes - start)):
                    return
