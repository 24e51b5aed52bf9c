"""The tokens that two ranks both hold of a request, cut wherever either side's memory is cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvferry.errors import InputError
from kvferry.layout.deal import I64, Segments, extent, segments
from kvferry.layout.space import Space

MAX_TOKENS = 1 << 24
"""Of one request (or rows of one list); a peer's numbers are bounded before anything is allocated."""


class Overlap(NamedTuple):
    """Tokens that are consecutive slots on both sides.

    Attributes:
        src_slot: int64[R] slot of the first token at the source.
        dst_slot: int64[R] slot of the first token at the destination.
        tokens: int64[R] how many.
    """

    src_slot: I64
    dst_slot: I64
    tokens: I64


def common_extent(src: Space, dst: Space, prefix_tokens: int, num_tokens: int, rows: int) -> tuple[int, int]:
    """The positions [lo, hi) that both sides cover.

    Raises:
        InputError: not 0 <= prefix_tokens <= num_tokens, or a number is out of bounds.
    """
    if not 0 <= prefix_tokens <= num_tokens <= MAX_TOKENS or not 0 <= rows * dst.page_tokens <= MAX_TOKENS:
        what = f"space {dst.name!r}: prefix_tokens {prefix_tokens}, num_tokens {num_tokens}, rows {rows}"
        raise InputError(what, hint=f"0 <= prefix_tokens <= num_tokens <= {MAX_TOKENS}, and rows of as many tokens")
    (src_lo, src_hi), (dst_lo, dst_hi) = (extent(side, prefix_tokens, num_tokens, rows) for side in (src, dst))
    return max(src_lo, dst_lo), min(src_hi, dst_hi)


def overlap(src: Space, dst: Space, lo: int, hi: int, num_tokens: int, *, by_page: bool) -> Overlap:
    """Intersect both sides' segments of the positions [lo, hi).

    Args:
        src: the source's space.
        dst: the destination's space.
        lo: first position.
        hi: end of the positions.
        num_tokens: tokens of the request.
        by_page: whether to cut at page boundaries too, so that each run lies in one page on each side.
    """
    ours, theirs = segments(src, lo, hi, num_tokens), segments(dst, lo, hi, num_tokens)
    ends = [part for side in (ours, theirs) for part in (side.token, side.token + side.length)]
    if by_page:
        ends += [_page_starts(ours, src.page_tokens), _page_starts(theirs, dst.page_tokens)]
    cuts = np.unique(np.concatenate(ends))
    token, tokens = cuts[:-1], np.diff(cuts)
    src_slot, dst_slot = _slots(ours, token), _slots(theirs, token)
    both = (src_slot >= 0) & (dst_slot >= 0)
    return Overlap(src_slot[both], dst_slot[both], tokens[both])


def _page_starts(part: Segments, page_tokens: int) -> I64:
    """The tokens whose slots start a page."""
    if not len(part.slot):
        return part.token
    first = part.slot[0] + -part.slot[0] % page_tokens
    slots = np.arange(first, part.slot[-1] + part.length[-1], page_tokens)
    inside = np.searchsorted(part.slot, slots, side="right") - 1
    return part.token[inside] + slots - part.slot[inside]


def _slots(part: Segments, token: I64) -> I64:
    """The tokens' slots; -1 for a token that the rank does not hold."""
    if not len(part.slot):
        return np.full_like(token, -1)
    inside = np.searchsorted(part.token, token, side="right") - 1
    ahead = token - part.token[inside]
    # before the first segment `inside` is -1, the last one, whose tokens are all ahead: negative, so not held
    return np.where((ahead >= 0) & (ahead < part.length[inside]), part.slot[inside] + ahead, -1)
