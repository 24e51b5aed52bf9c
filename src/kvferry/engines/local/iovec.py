"""Rows as the kernel's iovec arrays, with a position: what is still to be moved after a short count."""

from __future__ import annotations

import numpy as np

from kvferry.plan.batch import U64

IOVECS_PER_CALL = 1024
"""The most that one system call takes (IOV_MAX)."""


def vectors_of(addresses: U64, nbytes: U64) -> U64:
    """Turn rows into iovecs, neighbours in memory that follow each other merged.

    Args:
        addresses: uint64[N] where each row starts.
        nbytes: uint64[N] bytes per row, none 0.

    Returns:
        uint64[M, 2] of (base, length), M <= N, freshly made.
    """
    out = np.empty((len(addresses), 2), np.uint64)
    out[:, 0], out[:, 1] = addresses, nbytes
    if len(out) < 2:
        return out
    joined = addresses[1:] == addresses[:-1] + nbytes[:-1]
    if not joined.any():
        return out
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    merged = out[first]
    merged[:, 1] = np.add.reduceat(nbytes, first)
    return merged


def merged_rows(src: U64, dst: U64, nbytes: U64) -> tuple[U64, U64, U64]:
    """Merge rows that follow each other both here and there.

    Args:
        src: uint64[N] addresses here.
        dst: uint64[N] addresses there.
        nbytes: uint64[N] bytes per row, none 0.

    Returns:
        The same three for M <= N rows; the arrays that were given if nothing can be merged.
    """
    joined = (src[1:] == src[:-1] + nbytes[:-1]) & (dst[1:] == dst[:-1] + nbytes[:-1])
    if not joined.any():
        return src, dst, nbytes
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return src[first], dst[first], np.add.reduceat(nbytes, first)


class Cursor:
    """iovecs of which the first `done` of `total` bytes have been moved."""

    def __init__(self, vectors: U64, total: int) -> None:
        self._vectors = vectors
        self._past: U64 | None = None
        self._at = 0
        self.done = 0
        self.total = total

    @property
    def left(self) -> int:
        """Bytes still to be moved."""
        return self.total - self.done

    def window(self) -> U64:
        """The iovecs to hand to the next system call: uint64[K, 2], K <= 1024, a view."""
        return self._vectors[self._at : self._at + IOVECS_PER_CALL]

    def advance(self, nbytes: int) -> None:
        """Say that the next nbytes bytes have been moved; nbytes <= left."""
        self.done += nbytes
        if self.done == self.total:
            self._at = len(self._vectors)
            return
        if self._past is None:
            self._past = np.cumsum(self._vectors[:, 1])
        at = int(np.searchsorted(self._past, self.done, side="right"))
        left = int(self._past[at]) - self.done
        base, length = self._vectors[at]
        self._vectors[at] = int(base) + int(length) - left, left
        self._at = at


def row_at(nbytes: U64, offset: int) -> int:
    """The row that the byte at an offset (in bytes, over all rows in order) belongs to."""
    return int(np.searchsorted(np.cumsum(nbytes), offset, side="right"))
