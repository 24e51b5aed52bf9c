"""Copies batches into other processes, large ones with more than one thread.

One thread reaches 0.7 to 0.9 of what a memcpy does, two 1.0 to 1.2: process_vm_writev looks up the target's pages one
by one, and what it waits for there another processor can do meanwhile. Each part is one system call per 1,024 rows,
which gives the interpreter away once.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from kvferry.engines.local.iovec import Cursor, row_at, vectors_of
from kvferry.engines.local.syscalls import error_name, write_memory
from kvferry.plan.batch import Batch

log = logging.getLogger("kvferry.engines.local")

SPLIT_BYTES = 1 << 20
"""Below this waking a thread costs more than it brings."""


class Copier:
    """Owned by one engine; `write` is called by one thread at a time."""

    def __init__(self, threads: int) -> None:
        """Use up to `threads` threads, the caller's included; the others are started with the first large batch."""
        self._threads = threads
        self._others: list[_Helper] | None = None

    def write(self, pid: int, batch: Batch) -> tuple[str, str]:
        """Copy a batch into a process; returns, or raises, when no part of it is under way any more.

        Returns:
            ("", ""), or in words how far it came, and the errno's name.
        """
        helpers = self._helpers(batch)
        cuts = [batch.total_bytes * number // (len(helpers) + 1) for number in range(len(helpers) + 2)]
        for helper, (low, high) in zip(helpers, pairwise(cuts[1:]), strict=True):
            helper.begin(partial(self._part, pid, batch, low, high))
        try:
            mine = self._part(pid, batch, *cuts[:2])
        finally:
            ended = [helper.end() for helper in helpers]
        found = [mine, *(each() for each in ended)]
        return next((each for each in found if each[0]), ("", ""))

    def close(self) -> None:
        """End the threads."""
        for helper in self._others or ():
            helper.leave()
        self._others, self._threads = None, 1

    def _helpers(self, batch: Batch) -> list[_Helper]:
        """The threads that take part; none for what one thread does as well, or where no thread can be started."""
        if self._threads == 1 or batch.total_bytes < SPLIT_BYTES or _runs(batch) < 2 * self._threads:
            return []
        if self._others is None:
            self._others = []
            try:
                for _ in range(self._threads - 1):
                    self._others.append(_Helper())
            except RuntimeError as error:
                log.warning("%d threads copy, %d were asked for: %s", len(self._others) + 1, self._threads, error)
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


class _Helper:
    """A thread that runs; what it is given it does at once, and nobody else can be given it later.

    An executor queues first and starts a thread after: where that fails, what was queued is copied some other time,
    into pages that belong to somebody else by then.
    """

    def __init__(self) -> None:
        """Start the thread; raises RuntimeError where there is none to be had."""
        self._work: queue.SimpleQueue[Callable[[], tuple[str, str]] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Callable[[], tuple[str, str]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="kvferry-copy", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], tuple[str, str]]) -> None:
        """Have something done."""
        self._work.put(work)

    def end(self) -> Callable[[], tuple[str, str]]:
        """Wait until it is done; the result, when called, is what came of it, or raises what it raised."""
        return self._ended.get()

    def leave(self) -> None:
        """End the thread."""
        self._work.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - raised again by who asked
                self._ended.put(partial(_raise, error))
            else:
                self._ended.put(partial(_give, result))


def _give(result: tuple[str, str]) -> tuple[str, str]:
    return result


def _raise(error: BaseException) -> tuple[str, str]:
    raise error


def _runs(batch: Batch) -> int:
    """Rows, neighbours counted as one: of long runs one thread copies as fast as memory allows."""
    apart = (np.diff(batch.src) != batch.nbytes[:-1]) | (np.diff(batch.dst) != batch.nbytes[:-1])
    return 1 + int(np.count_nonzero(apart))


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
