"""Many seeded worlds, one report."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from kvferry.testing.planted import planted
from kvferry.testing.world import World

ROOMS_PER_WORLD = 50


@dataclass
class Report:
    """What a simulation found.

    Attributes:
        rooms: rooms played.
        worlds: worlds played.
        violations: (seed, text) of each violated invariant; the seed replays it.
        messages_per_room: mean number of messages.
        kills: processes killed.
        rooms_per_s: speed.
        outcomes: how often an offer or claim ended in which state.
    """

    rooms: int = 0
    worlds: int = 0
    violations: list[tuple[int, str]] = field(default_factory=list)
    messages: int = 0
    kills: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def messages_per_room(self) -> float:
        """Mean number of messages of a room."""
        return self.messages / max(1, self.rooms)

    @property
    def rooms_per_s(self) -> float:
        """Rooms played in a second."""
        return self.rooms / max(1e-9, self.seconds)


def simulate(rooms: int, seed: int = 0, *, mistake: str = "", stop_at_first: bool = False) -> Report:
    """Play `rooms` rooms in worlds of ROOMS_PER_WORLD, seeded from `seed` on.

    Args:
        rooms: how many rooms.
        seed: seed of the first world; the next has seed + 1.
        mistake: a key of testing.planted.MISTAKES to plant, "" for none.
        stop_at_first: end after the first world with a violation.
    """
    report = Report()
    start = time.perf_counter()
    with planted(mistake):
        while report.rooms < rooms:
            count = min(ROOMS_PER_WORLD, rooms - report.rooms)
            world = World(seed + report.worlds, count)
            report.violations += [(seed + report.worlds, text) for text in world.run()]
            report.worlds += 1
            report.rooms += count
            report.messages += world.messages
            report.kills += world.kills
            report.outcomes.update(world.finished)
            if stop_at_first and report.violations:
                break
    report.seconds = time.perf_counter() - start
    return report
