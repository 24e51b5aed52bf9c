"""Who sends: in each space one of the sources that hold the same part of a destination, elected by the destination."""

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
        sends: the spaces that it sends; replicas of it send what else it holds.
    """

    involved: bool
    sends: tuple[str, ...]


def holdings(src: Layout, dst: Layout) -> dict[str, Hashable]:
    """What src holds of dst, per space where there is any: equal values are the same bytes, on any request."""
    kinds = kinds_of(dst)
    wanted, held = elements(dst, kinds).key, elements(src, kinds).key
    deals = {space.name: space.deal for space in src.spaces}
    parts: dict[str, Hashable] = {}
    for space in dst.spaces:
        mine = np.intersect1d(wanted[in_space(wanted, kinds, space.name)], held)
        if len(mine) and can_meet(deals[space.name], space.deal):
            parts[space.name] = canonical(deals[space.name]), mine.tobytes()
    return parts


class Election:
    """The shares of all sources in one destination, for any room; what they hold is compared once."""

    def __init__(self, dst: Layout, sources: Sequence[Layout], group: Sequence[Layout] = ()) -> None:
        """Compare.

        Args:
            dst: the destination.
            sources: all ranks of the source's side that it may hear from.
            group: all ranks of the destination's side, itself among them; () if it is alone. Where several of them
                want the same bytes they turn to different replicas: ranks of equal grids each to their own index.
        """
        held = [holdings(source, dst) for source in sources]
        self._involved = [bool(parts) for parts in held]
        self._groups: list[tuple[str, list[int]]] = []
        for space in dst.spaces:
            replicas: dict[Hashable, list[int]] = {}
            for index, parts in enumerate(held):
                if space.name in parts:
                    replicas.setdefault(parts[space.name], []).append(index)
            for members in replicas.values():
                first = sources[members[0]]
                others = [other.rank for other in group if space.name in holdings(first, other)] or [dst.rank]
                self._groups.append((space.name, _candidates(members, others.index(dst.rank), len(others))))

    def shares(self, room: int) -> list[Share]:
        """One share per source, in the order of the sources; rooms are spread over the replicas."""
        sends: list[list[str]] = [[] for _ in self._involved]
        for space, members in self._groups:
            sends[members[room % len(members)]].append(space)
        return [Share(involved, tuple(spaces)) for involved, spaces in zip(self._involved, sends, strict=True)]


def elect(dst: Layout, sources: Sequence[Layout], room: int) -> list[Share]:
    """Elect one source of each set of replicas, per space.

    Returns:
        One share per source, in the order of the sources.
    """
    return Election(dst, sources).shares(room)


def fan_in(src: Layout, destinations: Sequence[Layout]) -> int:
    """How many destinations hold something of src: all of them claim from it, elected or not."""
    return sum(bool(holdings(src, dst)) for dst in destinations)


def _candidates(members: list[int], position: int, claimants: int) -> list[int]:
    """The replicas that the claimant at `position` of `claimants` turns to: an even cut of them."""
    begin = position * len(members) // claimants
    return members[begin : max(begin + 1, (position + 1) * len(members) // claimants)]
