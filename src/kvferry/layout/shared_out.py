"""Do the ranks of a side together hold every token of any request that another rank needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.layout.deal import canonical, segments
from kvferry.layout.space import Cyclic, Deal, Ranges, Space
from kvferry.layout.tensor import Layout

PROBE_UNITS = 1 << 16
"""How far is looked where it is not known when the deals repeat, or they repeat late."""

_SHOWN = 4

Part = frozenset[int]
Family = tuple[type, int, int]
"""Deals that are cut alike: their kind, unit, and number of parts."""


def tokens_missing(sources: Sequence[Layout], held: Sequence[npt.NDArray[np.bool_]], space: Space) -> str:
    """What no source holds.

    Args:
        sources: all ranks of the side.
        held: bool[E] for each source, which of E elements of the space it holds.
        space: the destination's.

    Returns:
        "" or the first token that is missing of some element, or that it can't be shown that none is.
    """
    deals = [_deal(source, space.name) for source in sources]
    unique = sorted({deal for deal in deals if deal is not None}, key=repr)
    by_deal = [np.any([mask for mask, own in zip(held, deals, strict=True) if own == deal], axis=0) for deal in unique]
    for pattern in {tuple(column) for column in np.array(by_deal, bool).T}:
        owners = [deal for deal, is_owner in zip(unique, pattern, strict=True) if is_owner]
        if reason := _missing(owners, canonical(space.deal)):
            return f"space {space.name!r}: {reason}; start all context parallel ranks of prefill"
    return ""


def _missing(owners: Sequence[Deal], wanted: Deal) -> str:
    if _is_shown(owners, wanted) or _repeats_without_gap(owners, wanted):
        return ""
    tokens = PROBE_UNITS * _step(owners, wanted)
    gap = _first_gap(owners, wanted, tokens)
    some = f"prefill ranks that hold {_named(owners)}"
    if gap >= 0:
        return f"decode needs token {gap} of a request of {tokens}, {some} lack it"
    return f"decode holds {_named([wanted])}, and it can't be shown that {some} have all of it of any request"


def _is_shown(owners: Sequence[Deal], wanted: Deal) -> bool:
    """Whether the deals of one family have all parts, or all that are wanted, however long a request is."""
    families: dict[Family, Part] = {}
    for deal in owners:
        family, parts = _parts_of(deal)
        families[family] = families.get(family, frozenset()) | parts
    family, parts = _parts_of(wanted)
    complete = any(len(held) == count for (_, _, count), held in families.items())
    return complete or parts <= families.get(family, frozenset())


def _parts_of(deal: Deal) -> tuple[Family, Part]:
    if isinstance(deal, Ranges):
        return (Ranges, deal.unit_tokens, deal.parts), frozenset(deal.owned)
    return (Cyclic, deal.unit_tokens, deal.ranks), frozenset((deal.rank,))


def _repeats_without_gap(owners: Sequence[Deal], wanted: Deal) -> bool:
    """Whether what is dealt round-robin, and does not depend on a request's length, has no gap until it repeats."""
    if isinstance(wanted, Ranges):
        return False
    cyclic = [deal for deal in owners if isinstance(deal, Cyclic)]
    tokens = math.lcm(*(deal.unit_tokens * deal.ranks for deal in (*cyclic, wanted)))
    return tokens <= PROBE_UNITS * _step(cyclic, wanted) and _first_gap(cyclic, wanted, tokens) < 0


def _step(owners: Sequence[Deal], wanted: Deal) -> int:
    """All cuts lie at multiples of it; the whole has none."""
    return math.gcd(*(deal.unit_tokens for deal in (*owners, wanted) if deal != Cyclic())) or 1


def _first_gap(owners: Sequence[Deal], wanted: Deal, tokens: int) -> int:
    """The first token of a request that is wanted and not held; -1 if there is none."""
    step = _step(owners, wanted)
    depth = np.zeros(tokens // step + 1, np.int64)
    needed = np.zeros_like(depth)
    for target, deal in [(needed, wanted), *((depth, deal) for deal in owners)]:
        part = segments(Space(deal=deal), 0, tokens, tokens)
        np.add.at(target, part.token // step, 1)
        np.add.at(target, (part.token + part.length) // step, -1)
    gaps = np.flatnonzero((np.cumsum(needed) > 0) & (np.cumsum(depth) == 0))
    return int(gaps[0]) * step if len(gaps) else -1


def _deal(layout: Layout, space: str) -> Deal | None:
    return next((canonical(own.deal) for own in layout.spaces if own.name == space), None)


def _named(deals: Sequence[Deal]) -> str:
    """The deals in words of a bounded length: they travel to the other side."""
    shown = ", ".join(_one(deal) for deal in deals[:_SHOWN])
    return f"[{shown} and {len(deals) - _SHOWN} more]" if len(deals) > _SHOWN else f"[{shown}]"


def _one(deal: Deal) -> str:
    if isinstance(deal, Cyclic) or len(deal.owned) <= _SHOWN:
        return str(deal)
    return f"{len(deal.owned)} of {deal.parts} ranges in units of {deal.unit_tokens}"
