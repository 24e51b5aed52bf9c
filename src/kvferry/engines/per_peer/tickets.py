"""Tickets of an engine whose peers have threads: what has ended, and attachments that are waited for no more."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvferry.engines.seam import Done, Outcome, Ticket


class _Deadline(NamedTuple):
    limit_s: float
    until: float


class Tickets:
    """Reported to by any thread, collected by the engine's."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._ended: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._attaching: dict[Ticket, _Deadline] = {}
        self._given_up: set[Ticket] = set()

    def new(self) -> Ticket:
        """A number that was never used."""
        return next(self._numbers)

    def attaching(self, limit_s: float) -> tuple[Ticket, float]:
        """A ticket that fails by itself, and when, on the monotonic clock: nothing else tells of a stopped peer."""
        ticket, until = self.new(), time.monotonic() + limit_s
        self._attaching[ticket] = _Deadline(limit_s, until)
        return ticket, until

    def report(self, done: Done) -> None:
        """Say how a ticket ended."""
        self._ended.put(done)

    def refuse(self, ticket: Ticket, cause: str, native: str) -> None:
        """Nothing was begun."""
        self.report(Done(ticket, Outcome.FAILED_QUIET, cause, native))

    def collect(self, budget_s: float, look: Callable[[float], Iterable[Done]], look_every_s: float) -> list[Done]:
        """What has ended, waiting up to budget_s while nothing has.

        Args:
            budget_s: 0 never waits.
            look: gives more of that, told the time; called at least every look_every_s.
            look_every_s: in seconds.
        """
        until = time.monotonic() + budget_s
        while True:
            now = time.monotonic()
            # what is found by looking belongs to tickets that have been reported before
            found = list(look(now))
            done = self._overdue(now) + self._all_ended() + found
            if done or until <= now:
                return done
            wait_s = min(until, now + look_every_s, *(each.until for each in self._attaching.values())) - now
            with contextlib.suppress(queue.Empty):
                self._keep(self._ended.get(timeout=max(wait_s, 0.0)), done)
                return done + self._all_ended()

    def _all_ended(self) -> list[Done]:
        done: list[Done] = []
        with contextlib.suppress(queue.Empty):
            while True:
                self._keep(self._ended.get_nowait(), done)
        return done

    def _keep(self, one: Done, done: list[Done]) -> None:
        if one.ticket in self._given_up:
            self._given_up.discard(one.ticket)
        else:
            self._attaching.pop(one.ticket, None)
            done.append(one)

    def _overdue(self, now: float) -> list[Done]:
        late = {ticket: each.limit_s for ticket, each in self._attaching.items() if each.until < now}
        for ticket in late:
            del self._attaching[ticket]
            self._given_up.add(ticket)
        return [
            Done(ticket, Outcome.FAILED_QUIET, f"no answer within {limit_s:g} s", "deadline")
            for ticket, limit_s in late.items()
        ]
