"""Who sends: among sources that hold the same part of a destination, the destination elects one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.layout.deal import can_meet, canonical
from kvferry.layout.elements import elements, in_space, kinds_of
from kvferry.layout.tensor import Layout


class Share(NamedTuple):
    """A source's part in serving one destination.

    Attributes:
        involved: it holds something of the destination, so it gets a claim.
        elected: it is the one that sends it.
    """

    involved: bool
    elected: bool


def holding(src: Layout, dst: Layout) -> Hashable:
    """What src holds of dst: equal values are the same bytes, None is nothing, on any request."""
    kinds = kinds_of(dst)
    wanted, held = elements(dst, kinds).key, elements(src, kinds).key
    deals = {space.name: space.deal for space in src.spaces}
    parts = []
    for space in dst.spaces:
        mine = np.intersect1d(wanted[in_space(wanted, kinds, space.name)], held)
        if len(mine) and can_meet(deals[space.name], space.deal):
            parts.append((space.name, canonical(deals[space.name]), mine.tobytes()))
    return tuple(parts) or None


class Election:
    """The shares of all sources in one destination, for any room; what they hold is compared once."""

    def __init__(self, dst: Layout, sources: Sequence[Layout]) -> None:
        groups: dict[Hashable, list[int]] = {}
        for index, source in enumerate(sources):
            groups.setdefault(holding(source, dst), []).append(index)
        self._idle = groups.pop(None, [])
        self._groups = [_candidates(dst, sources, group) for group in groups.values()]
        self._count = len(sources)

    def shares(self, room: int) -> list[Share]:
        """One share per source, in the order of the sources."""
        idle = set(self._idle)
        elected = {group[room % len(group)] for group in self._groups}
        return [Share(index not in idle, index in elected) for index in range(self._count)]


def elect(dst: Layout, sources: Sequence[Layout], room: int) -> list[Share]:
    """Elect one source of each set of replicas: the destination's own rank index, else spread by room.

    Returns:
        One share per source, in the order of the sources.
    """
    return Election(dst, sources).shares(room)


def fan_in(src: Layout, destinations: Sequence[Layout]) -> int:
    """How many destinations hold something of src: all of them claim from it, elected or not."""
    return sum(holding(src, dst) is not None for dst in destinations)


def _candidates(dst: Layout, sources: Sequence[Layout], group: list[int]) -> list[int]:
    same = [i for i in group if (sources[i].rank.cp, sources[i].rank.tp) == (dst.rank.cp, dst.rank.tp)]
    return same or group
