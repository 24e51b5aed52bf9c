"""A scheduler with many requests in flight: it opens as many as its window holds and polls all of them in turns."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvferry.api import KVPoll
from kvferry.api.room import Room
from kvferry.bench.failure import BenchError
from kvferry.bench.habits import ENDED, require


class Window:
    """Requests in flight, each with the page of its place.

    Args:
        size: how many there may be at once.
        limit_s: longest time in which none of them ends.
    """

    def __init__(self, size: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._free = list(range(size))
        self._open: dict[int, Room] = {}

    def run(
        self, rooms: Iterable[int], begin: Callable[[int, int], Room], ended: Callable[[int, int], None] | None = None
    ) -> None:
        """Go through all requests.

        Args:
            rooms: their numbers, in the order in which they are opened.
            begin: opens a request, given (page, room).
            ended: called with (page, room) after Success.

        Raises:
            KVTransferError: one has failed.
            BenchError: none has ended for limit_s.
        """
        waiting = deque(rooms)
        last_s = time.monotonic()
        while waiting or self._open:
            while waiting and self._free:
                page = self._free.pop()
                self._open[page] = begin(page, waiting.popleft())
            if self._collect(ended):
                last_s = time.monotonic()
            elif time.monotonic() - last_s > self._limit_s:
                raise BenchError(f"none of {len(self._open)} rooms has ended for {self._limit_s:g} s")
            os.sched_yield()

    def _collect(self, ended: Callable[[int, int], None] | None) -> int:
        """Give back the rooms that have succeeded; returns how many."""
        found = [(page, room) for page, room in self._open.items() if room.poll() in ENDED]
        for page, room in found:
            require(room, room.poll(), {KVPoll.Success}, self._limit_s)
            room.clear()
            del self._open[page]
            self._free.append(page)
            if ended is not None:
                ended(page, room.bootstrap_room)
        return len(found)
