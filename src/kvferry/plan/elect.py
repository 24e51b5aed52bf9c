"""Who sends: of each field one of the sources that hold the same part of a destination, elected by the destination."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.layout.deal import can_meet, canonical
from kvferry.layout.elements import ID_BITS, elements, kinds_of
from kvferry.layout.tensor import Layout


class Share(NamedTuple):
    """A source's part in serving one destination.

    Attributes:
        involved: it holds something of the destination, so it gets a claim.
        sends: per space the fields that it sends; replicas of it send what else it holds.
    """

    involved: bool
    sends: dict[str, tuple[str, ...]]


Kind = tuple[str, str]
"""Space and field."""


class _Held:
    """What a rank holds: deals per space, keys (layers and heads) per field."""

    def __init__(self, layout: Layout) -> None:
        self.rank = layout.rank
        self.deals = {space.name: space.deal for space in layout.spaces}
        kinds = kinds_of(layout)
        keys = elements(layout, kinds).key
        mask = (1 << 2 * ID_BITS) - 1
        self.keys = {kind: np.sort(keys[keys >> 2 * ID_BITS == number] & mask) for kind, number in kinds.items()}

    def part_for(self, dst: _Held, kind: Kind) -> bytes:
        """The common keys of a field; b"" where no request has common bytes."""
        if kind not in self.keys or kind not in dst.keys or not can_meet(self.deals[kind[0]], dst.deals[kind[0]]):
            return b""
        return np.intersect1d(self.keys[kind], dst.keys[kind], assume_unique=True).tobytes()


def holdings(src: Layout, dst: Layout) -> dict[Kind, Hashable]:
    """What src holds of dst, per field where there is any: equal values are the same bytes, on any request."""
    return _holdings(_Held(src), _Held(dst))


def _holdings(src: _Held, dst: _Held) -> dict[Kind, Hashable]:
    parts = {kind: src.part_for(dst, kind) for kind in dst.keys}
    return {kind: (canonical(src.deals[kind[0]]), part) for kind, part in parts.items() if part}


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
        mine, ours, theirs = _Held(dst), [_Held(source) for source in sources], [_Held(other) for other in group]
        found = [_holdings(source, mine) for source in ours]
        self._involved = [bool(parts) for parts in found]
        replicas: dict[tuple[Kind, Hashable], list[int]] = {}
        for index, parts in enumerate(found):
            for part in parts.items():
                replicas.setdefault(part, []).append(index)
        self._groups: list[tuple[Kind, list[int]]] = []
        for (kind, _), members in replicas.items():
            first = ours[members[0]]
            claimants = [other.rank for other in theirs if first.part_for(other, kind)] or [dst.rank]
            self._groups.append((kind, _candidates(members, claimants.index(dst.rank), len(claimants))))

    def shares(self, room: int) -> list[Share]:
        """One share per source, in the order of the sources; rooms are spread over the replicas."""
        sends: list[dict[str, tuple[str, ...]]] = [{} for _ in self._involved]
        for (space, name), members in self._groups:
            mine = sends[members[room % len(members)]]
            mine[space] = (*mine.get(space, ()), name)
        return [Share(*each) for each in zip(self._involved, sends, strict=True)]


def elect(dst: Layout, sources: Sequence[Layout], room: int) -> list[Share]:
    """Elect one source of each set of replicas, per field.

    Returns:
        One share per source, in the order of the sources.
    """
    return Election(dst, sources).shares(room)


def fan_in(src: Layout, destinations: Sequence[Layout]) -> int:
    """How many destinations hold something of src: all of them claim from it, elected or not."""
    return Destinations(destinations).fan_in(src)


class Destinations:
    """All ranks of a decode side; what they hold is spelled out once, however many sources come."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._held = [_Held(layout) for layout in layouts]

    def fan_in(self, src: Layout) -> int:
        """How many of them hold something of src."""
        held = _Held(src)
        return sum(any(held.part_for(dst, kind) for kind in dst.keys) for dst in self._held)


def _candidates(members: list[int], position: int, claimants: int) -> list[int]:
    """The replicas that the claimant at `position` of `claimants` turns to: an even cut of them."""
    begin = position * len(members) // claimants
    return members[begin : max(begin + 1, (position + 1) * len(members) // claimants)]
