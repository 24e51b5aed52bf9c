"""The writer's own checks of a batch, before any engine sees it, and parts of one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from kvferry.engines.intervals import Intervals
from kvferry.plan.batch import Batch, Limits

_FEW = 64
"""Rows that are added up sooner without numpy."""


def why_not(batch: Batch, sources: Intervals, limits: Limits) -> str:
    """Say why a batch can't be written, or "".

    Args:
        batch: the rows.
        sources: the registered memory of this process.
        limits: the most that one batch may hold.
    """
    rows = len(batch)
    if len(batch.dst) != rows or len(batch.nbytes) != rows:
        return f"a batch has {rows} sources, {len(batch.dst)} destinations and {len(batch.nbytes)} lengths"
    if rows > limits.rows or batch.total_bytes > limits.bytes:
        return (
            f"a batch has {rows} rows and {batch.total_bytes} bytes; "
            f"the engine takes at most {limits.rows} rows and {limits.bytes} bytes"
        )
    row = sources.first_outside(batch.src, batch.nbytes)
    if row is not None:
        return (
            f"row {row} of {rows}, {int(batch.nbytes[row])} bytes at {int(batch.src[row]):#x} here, does not "
            "lie in one registered region of this process"
        )
    total = sum(batch.nbytes.tolist()) if rows <= _FEW else int(batch.nbytes.sum())
    if total != batch.total_bytes:
        return f"a batch says {batch.total_bytes} bytes and its rows add up to {total}"
    return ""


SPLIT_BYTES = 1 << 20
"""Of a batch below this no part is given to another thread: waking it costs more than it brings."""


def shares(total_bytes: int, number: int) -> Iterator[tuple[int, int]]:
    """Where equal parts of so many bytes begin and end, for `cut`."""
    return itertools.pairwise(total_bytes * each // number for each in range(number + 1))


def cut(batch: Batch, low: int, high: int) -> tuple[Batch, int]:
    """The bytes low to high of a batch, counted over its rows, and the number of the row that they begin in."""
    if (low, high) == (0, batch.total_bytes):
        return batch, 0
    ends = np.cumsum(batch.nbytes).astype(np.int64)
    first, last = (int(np.searchsorted(ends, at, side="right")) for at in (low, high - 1))
    some = slice(first, last + 1)
    nbytes = batch.nbytes[some].copy()
    before = low - int(ends[first] - nbytes[0])
    nbytes[-1] -= np.uint64(int(ends[last]) - high)
    nbytes[0] -= np.uint64(before)
    src, dst = batch.src[some].copy(), batch.dst[some].copy()
    src[0] += np.uint64(before)
    dst[0] += np.uint64(before)
    return Batch(src, dst, nbytes, high - low), first
