"""Copies batches into other processes, large ones with more than one thread.

One thread reaches 0.7 to 0.9 of what a memcpy does, two 1.0 to 1.2: process_vm_writev looks up the target's pages one
by one, and what it waits for there another processor can do meanwhile. Each part is one system call per 1,024 rows,
which gives the interpreter away once.
"""

from __future__ import annotations

import errno
import logging
from concurrent.futures import wait
from functools import partial

import numpy as np

from kvferry.engines.local.iovec import Cursor, row_at, vectors_of
from kvferry.engines.local.syscalls import error_name, write_memory
from kvferry.engines.rows import SPLIT_BYTES, cut, shares
from kvferry.plan.batch import Batch
from kvferry.workers import Workers

log = logging.getLogger("kvferry.engines.local")


class Copier:
    """Owned by one engine; `write` is called by one thread at a time."""

    def __init__(self, threads: int) -> None:
        """Use up to `threads` threads, the caller's included; the others are started with the first large batch."""
        self._threads = threads
        self._others: Workers | None = None

    def write(self, pid: int, batch: Batch) -> tuple[str, str]:
        """Copy a batch into a process; returns, or raises, when no part of it is under way any more.

        Returns:
            ("", ""), or in words how far it came, and the errno's name.
        """
        others = self._others_for(batch)
        parts = others.running + 1 if others else 1
        (low, high), *theirs = shares(batch.total_bytes, parts)
        given = [others.submit(partial(self._part, pid, batch, *their)) for their in theirs] if others else []
        try:
            mine = self._part(pid, batch, low, high)
        finally:
            wait(given)
        found = [mine, *(each.result() for each in given)]
        return next((each for each in found if each[0]), ("", ""))

    def close(self) -> None:
        """End the threads."""
        if self._others is not None:
            self._others.close()
        self._others, self._threads = None, 1

    def _others_for(self, batch: Batch) -> Workers | None:
        """The threads that take part; None for what one thread does as well."""
        if self._threads == 1 or batch.total_bytes < SPLIT_BYTES or _runs(batch) < 2 * self._threads:
            return None
        if self._others is None:
            self._others = Workers(self._threads - 1, "kvferry-copy")
            if self._others.problem:
                asked, problem = self._threads, self._others.problem
                log.warning("%d threads copy, %d were asked for: %s", self._others.running + 1, asked, problem)
        return self._others

    @staticmethod
    def _part(pid: int, batch: Batch, low: int, high: int) -> tuple[str, str]:
        """Copy the bytes low to high of a batch, counted over its rows."""
        part, begin = cut(batch, low, high)
        landed, error = copy_rows(pid, part)
        if error is None:
            return "", ""
        row = row_at(part.nbytes, landed)
        since = f" from row {begin} on" if begin else ""
        return (
            f"process_vm_writev stopped with {error_name(error)} ({error.strerror}) "
            f"in row {begin + row} of {len(batch)} ({int(part.nbytes[row])} bytes from {int(part.src[row]):#x} here "
            f"to {int(part.dst[row]):#x} there): {landed} of {part.total_bytes} bytes{since} are written"
        ), error_name(error)


def _runs(batch: Batch) -> int:
    """Rows, neighbours counted as one: of long runs one thread copies as fast as memory allows."""
    apart = (np.diff(batch.src) != batch.nbytes[:-1]) | (np.diff(batch.dst) != batch.nbytes[:-1])
    return 1 + int(np.count_nonzero(apart))


def copy_rows(pid: int, batch: Batch) -> tuple[int, OSError | None]:
    """Copy rows into a process; goes on after short counts until all is copied or a call copies nothing.

    Args:
        pid: the process.
        batch: checked rows.

    Returns:
        Bytes copied, in row order, and the error that ended it early, or None.
    """
    here = Cursor(vectors_of(batch.src, batch.nbytes), batch.total_bytes)
    there = Cursor(vectors_of(batch.dst, batch.nbytes), batch.total_bytes)
    while here.left:
        try:
            count = write_memory(pid, here.window(), there.window())
        except OSError as error:
            return here.done, error
        if not count:
            return here.done, OSError(errno.EIO, "process_vm_writev copied nothing and gave no reason")
        here.advance(count)
        there.advance(count)
    return here.done, None
