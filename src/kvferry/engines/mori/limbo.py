"""Batches that failed and may still land: what the library writes to is kept for them, and their end is watched."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import NamedTuple

from kvferry.engines.host import Process
from kvferry.engines.mori.flight import Flight
from kvferry.engines.mori.instance import Instance
from kvferry.engines.seam import Done, Outcome, Ticket
from kvferry.engines.unproven import Unproven

LOOK_EVERY_S = 0.05

_never_freed: list[Unfinished] = []
"""What was on its way when its engine was closed: the library still has its address."""


class Unfinished(NamedTuple):
    """What was given up.

    Attributes:
        ticket: whose outcome was FAILED_UNKNOWN; None where none is owed any more.
        flight: what may still be on its way.
        instance: that has it, and must not go before it is over.
        target: the process that was written to, where it says which it is.
    """

    ticket: Ticket | None
    flight: Flight
    instance: Instance
    target: Process | None


class Limbo:
    """Filled by the peers' threads, looked through by the engine's."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[Unfinished] = queue.SimpleQueue()
        self._flying: list[Unfinished] = []
        self._owed: set[Ticket] = set()
        self._unproven = Unproven()
        self._looked_at = 0.0
        self._is_closed = False

    def __len__(self) -> int:
        """What is still on its way."""
        return len(self._flying) + self._new.qsize()

    def add(self, one: Unfinished) -> None:
        """Watch it; any thread, also after `close`, when nobody looks any more."""
        self._new.put(one)
        if self._is_closed:
            self._keep()

    def news(self, now: float) -> list[Done]:
        """QUIET for what is done after all, and for that whose target has ended; looks now and then only."""
        if now - self._looked_at < LOOK_EVERY_S:
            return []
        self._looked_at = now
        self._take_new()
        quiet = [*self._done_after_all(), *(done.ticket for done in self._unproven.news(now))]
        proven = [ticket for ticket in dict.fromkeys(quiet) if ticket in self._owed]
        self._owed.difference_update(proven)
        return [Done(ticket, Outcome.QUIET) for ticket in proven]

    def close(self) -> None:
        """End the instances whose transfers are over; keep the others for ever."""
        self._take_new()
        for _ in self._done_after_all():
            pass
        self._is_closed = True
        self._keep()

    def _keep(self) -> None:
        while not self._new.empty():
            with contextlib.suppress(queue.Empty):
                _never_freed.append(self._new.get_nowait())
        _never_freed.extend(self._flying)
        self._flying.clear()

    def _take_new(self) -> None:
        while not self._new.empty():
            one = self._new.get()
            self._flying.append(one)
            if one.ticket is not None:
                self._owed.add(one.ticket)
                self._unproven.add(one.ticket, one.target)

    def _done_after_all(self) -> Iterator[Ticket]:
        for one in [one for one in self._flying if one.flight.over]:
            self._flying.remove(one)
            if one.ticket is not None and one.flight.verdict().outcome is Outcome.LANDED:
                yield one.ticket
            one.instance.close()
