"""From tokens to slots: which of a request's tokens a rank holds, in which slots, on how many pages.

The *positions* of a space are the request's tokens, or rows, or the one slot, as its coverage says. A rank
numbers the positions that it was dealt 0, 1, 2, ...: its slots. All of this is arithmetic on those numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.layout.space import Cyclic, Deal, Ranges, Rows, Slot, Space, Window

I64 = npt.NDArray[np.int64]


class Segments(NamedTuple):
    """Runs of consecutive tokens that are consecutive slots, in token order.

    Attributes:
        token: int64[S] first token of each run.
        slot: int64[S] its slot; slot[i + 1] == slot[i] + length[i].
        length: int64[S] number of tokens.
    """

    token: I64
    slot: I64
    length: I64


def segments(space: Space, lo: int, hi: int, num_tokens: int) -> Segments:
    """The tokens of [lo, hi) that this rank holds of a request of num_tokens tokens."""
    start, end = _owned(space.deal, lo, hi, num_tokens)
    length = end - start
    slot = slots_below(space, lo, num_tokens) + np.cumsum(length) - length
    return Segments(start, slot, length)


def slots_below(space: Space, token: int, num_tokens: int) -> int:
    """How many tokens below `token` this rank holds: the slot of the first one from there on."""
    deal = space.deal
    if isinstance(deal, Ranges):
        return sum(min(max(token - start, 0), end - start) for start, end in _parts(deal, num_tokens))
    cycles, rest = divmod(token, deal.unit_tokens * deal.ranks)
    inside = rest - deal.rank * deal.unit_tokens
    return cycles * deal.unit_tokens + min(max(inside, 0), deal.unit_tokens)


def first_slot(space: Space, token: int, num_tokens: int) -> int:
    """The first slot of the page of the first token >= `token`: where a page list from `token` on starts."""
    slot = slots_below(space, token, num_tokens)
    return slot - slot % space.page_tokens


def list_begin(space: Space, from_token: int, end_tokens: int, rows: int) -> int:
    """The slot that a page list from the page of token `from_token` on begins with."""
    lo, _ = extent(space, min(from_token, end_tokens), end_tokens, rows)
    return first_slot(space, lo, end_tokens)


def extent(space: Space, prefix_tokens: int, num_tokens: int, rows: int = 0) -> tuple[int, int]:
    """The positions [lo, hi) of the space that a request covers, above the prefix that decode already has."""
    coverage = space.coverage
    if isinstance(coverage, Slot):
        return 0, 1
    if isinstance(coverage, Rows):
        return 0, rows * space.page_tokens
    lo = prefix_tokens
    if isinstance(coverage, Window):
        kept = max(num_tokens - coverage.tokens, 0)
        lo = max(lo, kept - kept % space.page_tokens)
    return min(lo, num_tokens), num_tokens


def num_pages(space: Space, prefix_tokens: int, num_tokens: int, rows: int = 0) -> int:
    """How many page list entries this rank needs for a request."""
    lo, hi = extent(space, prefix_tokens, num_tokens, rows)
    first, end = slots_below(space, lo, num_tokens), slots_below(space, hi, num_tokens)
    return 0 if end == first else (end - 1) // space.page_tokens - first // space.page_tokens + 1


def canonical(deal: Deal) -> Deal:
    """The same deal in one spelling: equal values mean equal tokens."""
    if isinstance(deal, Ranges):
        owned = tuple(sorted(deal.owned))
        return Cyclic() if len(owned) == deal.parts else Ranges(deal.parts, owned, deal.unit_tokens)
    return Cyclic() if deal.ranks == 1 else deal


def can_meet(a: Deal, b: Deal) -> bool:
    """Whether some request can have a token that both hold; exact unless the cuts depend on its length."""
    if isinstance(a, Cyclic) and isinstance(b, Cyclic):
        # a token of both exists if some pair of offsets into the two cycles is congruent modulo their gcd
        cycle = math.gcd(a.unit_tokens * a.ranks, b.unit_tokens * b.ranks)
        highest = (a.rank + 1) * a.unit_tokens - 1 - b.rank * b.unit_tokens
        lowest = highest - (a.unit_tokens - 1) - (b.unit_tokens - 1)
        return highest // cycle * cycle >= lowest
    if isinstance(a, Ranges) and isinstance(b, Ranges) and (a.parts, a.unit_tokens) == (b.parts, b.unit_tokens):
        return not set(a.owned).isdisjoint(b.owned)
    return True


def _parts(deal: Ranges, num_tokens: int) -> list[tuple[int, int]]:
    base, extra = divmod(-(-num_tokens // deal.unit_tokens), deal.parts)

    def bound(part: int) -> int:
        return min((part * base + min(part, extra)) * deal.unit_tokens, num_tokens)

    return [(bound(part), bound(part + 1)) for part in sorted(deal.owned)]


def _owned(deal: Deal, lo: int, hi: int, num_tokens: int) -> tuple[I64, I64]:
    if isinstance(deal, Ranges):
        bounds = np.array(_parts(deal, num_tokens), np.int64).reshape(-1, 2).clip(lo, hi)
        start, end = bounds[bounds[:, 0] < bounds[:, 1]].T
        cut = start[1:] != end[:-1]  # neighbouring parts are one segment
        return start[np.append(True, cut)[: len(start)]], end[np.append(cut, True)[: len(end)]]
    if deal.ranks == 1:
        whole = np.array([[lo, hi]] if lo < hi else [], np.int64).reshape(-1, 2)
        return whole[:, 0], whole[:, 1]
    first = lo // deal.unit_tokens
    first += (deal.rank - first) % deal.ranks
    start = np.arange(first * deal.unit_tokens, hi, deal.unit_tokens * deal.ranks, dtype=np.int64)
    return np.maximum(start, lo), np.minimum(start + deal.unit_tokens, hi)
