"""Tickets that failed without a proof, and for which there can be one: their target runs on this host."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.engines.host import Process, has_ended, host_identity
from kvferry.engines.seam import Done, Outcome, Ticket

LOOK_EVERY_S = 0.05


class Unproven:
    """Nothing lands in the memory of a process that has ended.

    The process is what its blob names: one that names another can only make its own pages be reused too early.
    """

    def __init__(self) -> None:
        self._here = host_identity()
        self._tickets: dict[Process, list[Ticket]] = {}
        self._looked_at = 0.0

    def add(self, ticket: Ticket, target: Process | None) -> None:
        """Watch for the end of a ticket's target, if that can be seen from here."""
        if target is not None and target.host == self._here:
            self._tickets.setdefault(target, []).append(ticket)

    def news(self, now: float) -> Iterator[Done]:
        """QUIET for the tickets whose target has ended; looks now and then only."""
        if not self._tickets or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        for target in [target for target in self._tickets if has_ended(target)]:
            for ticket in self._tickets.pop(target):
                yield Done(ticket, Outcome.QUIET)
