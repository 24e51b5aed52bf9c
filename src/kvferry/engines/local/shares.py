"""What of the target's memory lies in memfd pools, and how a writer is given it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from kvferry.engines.intervals import Intervals
from kvferry.engines.local import frames
from kvferry.engines.local.frames import Part, Share
from kvferry.engines.local.syscalls import error_name
from kvferry.engines.seam import Region
from kvferry.pool import shared_pools

MAX_PARTS = 2048
_NO_MEMORY = "the peer has registered no memory"


class Shares:
    """Descriptors of the pools that all registered memory lies in, or why there are none; thread-safe.

    The descriptors are this object's own copies: a pool that is closed while it is registered stays shared, as it
    stays mapped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[Part] = []
        self._fds: list[int] = []
        self.why_not = _NO_MEMORY

    def replace(self, regions: Sequence[Region]) -> None:
        """Share these regions instead of the earlier ones, if every one of them lies in an open memfd pool."""
        starts = np.array([region.address for region in regions], np.uint64)
        merged = Intervals.merged(starts, starts + np.array([region.nbytes for region in regions], np.uint64))
        with self._lock:
            self._drop()
            try:
                self.why_not = self._take(merged)
            except OSError as error:
                self.why_not = (
                    f"the descriptor of a pool of the peer can't be duplicated: {error_name(error)}; "
                    "raise the limit on open files (ulimit -n)"
                )
            if self.why_not:
                self._drop()

    def send(self, connection: socket.socket) -> str:
        """Send all parts with their descriptors, without waiting; returns "" or why it can't be done."""
        with self._lock:
            if self.why_not:
                return self.why_not
            try:
                for share, fds in self._packets():
                    socket.send_fds(connection, [frames.encode_packet(share)], fds, socket.MSG_NOSIGNAL)
            except OSError as error:
                return f"the descriptors of the pools can't be sent: {error_name(error)}"
        return ""

    def close(self) -> None:
        """Close the descriptors; may be called twice."""
        with self._lock:
            self._drop()
            self.why_not = _NO_MEMORY

    def _drop(self) -> None:
        self._parts = []
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.pop())

    def _take(self, merged: Intervals) -> str:
        pools = sorted(shared_pools())
        files: dict[int, int] = {}
        for start, end in zip(merged.starts.tolist(), merged.ends.tolist(), strict=True):
            pool = next((pool for pool in pools if pool[0] <= start and end <= pool[0] + pool[1]), None)
            if pool is None:
                return (
                    f"the peer's memory is not in a shared pool ({end - start} bytes at {start:#x} are not); "
                    "allocate it with allocate_pool(kind='memfd')"
                )
            address, _, fd = pool
            if fd not in files:
                files[fd] = len(self._fds)
                self._fds.append(os.dup(fd))
            self._parts.append(Part(start, end - start, files[fd], start - address))
        if len(self._parts) > MAX_PARTS:
            return f"the peer's memory lies in {len(self._parts)} separate pieces, more than {MAX_PARTS}"
        return "" if self._parts else _NO_MEMORY

    def _packets(self) -> Iterator[tuple[Share, list[int]]]:
        for first in range(0, len(self._parts), frames.MAX_FDS):
            some = self._parts[first : first + frames.MAX_FDS]
            files = sorted({part.file for part in some})
            parts = [Part(part.address, part.nbytes, files.index(part.file), part.offset) for part in some]
            yield Share(parts), [self._fds[file] for file in files]
