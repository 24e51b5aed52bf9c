"""One batch for a small chunk, by the pattern of its size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.layout.deal import I64
from kvferry.plan.batch import Batch
from kvferry.plan.pattern import Pattern
from kvferry.plan.route import Leg, Route
from kvferry.plan.runs import PageList, Part

SMALL_BYTES = 256 << 10
"""Of a request that may be planned so."""


def small_batch(route: Route, parts: Sequence[Part], *, claim: int = 0, chunk: int = 0) -> Batch | None:
    """The rows of a chunk that holds all of a small request.

    Returns:
        None where `runs` must be asked: the pages are a part of the request's, or not what they should be.

    Raises:
        InputError: the numbers make no request, as in `runs`.
    """
    found = []
    for part in parts:
        leg = route.leg(part.space)
        lo, hi = leg.extent(part.prefix_tokens, part.num_tokens, part.rows)
        if hi <= lo or not len(leg.overlap(lo, hi, part.num_tokens).tokens):
            return None
        pattern = leg.pattern(lo, hi, part.num_tokens)
        if not _fits(leg, pattern, 0, part.src) or not _fits(leg, pattern, 1, part.dst):
            return None
        found.append((leg, pattern, part))
    if not found:
        return None
    src, dst = (np.concatenate([_addresses(*each, side) for each in found]) for side in (0, 1))
    nbytes = np.concatenate([pattern.nbytes for _, pattern, _ in found])
    total = int(nbytes.sum())
    return Batch(src.view(np.uint64), dst.view(np.uint64), nbytes.view(np.uint64), total, claim, chunk)


def _fits(leg: Leg, pattern: Pattern, side: int, given: PageList) -> bool:
    """Whether a page list holds all pages of the pattern, and they exist."""
    first, rest = divmod(given.first_slot, leg.page_tokens[side])
    low, high = pattern.pages[side]
    numbers = given.indices.tolist()
    inside = not rest and first <= low and high < first + len(numbers)
    return inside and min(numbers) >= 0 and max(numbers) < leg.pages[side]


def _addresses(leg: Leg, pattern: Pattern, part: Part, side: int) -> I64:
    given = (part.src, part.dst)[side]
    return pattern.addresses(side, np.asarray(given.indices, np.int64), given.first_slot // leg.page_tokens[side])
