"""A request's token runs: both sides' page lists, cut at the union of both sides' cut points."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.layout.deal import I64, slots_below
from kvferry.layout.space import Space
from kvferry.plan.route import Route


class PageList(NamedTuple):
    """Consecutive pages of a request on one rank.

    Attributes:
        indices: int32 or int64[P] page numbers in the pool.
        first_slot: the slot that the first page starts with, a multiple of the page size.
    """

    indices: npt.NDArray[np.int32] | I64
    first_slot: int = 0


class Runs(NamedTuple):
    """Runs of tokens that lie in one page on each side.

    Attributes:
        space: name of the space.
        src_slot: int64[R] physical slot (page * page_tokens + offset) of the first token at the source.
        dst_slot: int64[R] the same at the destination.
        tokens: int64[R] tokens of the run.
    """

    space: str
    src_slot: I64
    dst_slot: I64
    tokens: I64


class Part(NamedTuple):
    """What one space contributes to a chunk.

    Attributes:
        space: name of the space.
        prefix_tokens: tokens that decode already has; they are never written.
        num_tokens: tokens of the request.
        src: the source's pages: of the whole request or of one chunk. What lies outside is left out.
        dst: the destination's pages; they must hold all of its tokens from prefix_tokens on.
        rows: number of rows, where the coverage is Rows.
        is_whole: src is of the whole request, and a list that is too short is refused.
    """

    space: str
    prefix_tokens: int
    num_tokens: int
    src: PageList
    dst: PageList
    rows: int = 0
    is_whole: bool = False


def runs(route: Route, part: Part) -> Runs:
    """Find the tokens of [prefix_tokens, num_tokens) that the source's pages hold for the destination's.

    Raises:
        InputError: the destination's (or a whole source's) list is too short, a page number lies outside the pool, a
            list starts inside a page, the prefix lies inside a granule, or the numbers are out of bounds.
    """
    space, prefix_tokens, num_tokens, src, dst, rows, _ = part
    leg = route.leg(space)
    _check_pages("prefill", leg.src, leg.pages[0], src)
    _check_pages("decode", leg.dst, leg.pages[1], dst)
    lo, hi = leg.extent(prefix_tokens, num_tokens, rows)
    _check_held("decode", leg.dst, (lo, hi, num_tokens), dst)
    if part.is_whole:
        _check_held("prefill", leg.src, (lo, hi, num_tokens), src)
    found = leg.overlap(lo, hi, num_tokens)
    first, end = src.first_slot, src.first_slot + len(src.indices) * leg.src.page_tokens
    here = (found.src_slot >= first) & (found.src_slot < end)
    src_slot = _physical(src, found.src_slot[here], leg.src.page_tokens)
    dst_slot = _physical(dst, found.dst_slot[here], leg.dst.page_tokens)
    return Runs(space, src_slot, dst_slot, found.tokens[here])


def _check_pages(side: str, space: Space, pages: int, given: PageList) -> None:
    where = f"{side} page list of space {space.name!r}"
    if given.first_slot < 0 or given.first_slot % space.page_tokens:
        what = f"{where}: first_slot is {given.first_slot}, pages have {space.page_tokens} tokens"
        raise InputError(what, hint="a list starts with the first slot of a page, see first_slot()")
    lowest, highest = (int(given.indices.min()), int(given.indices.max())) if len(given.indices) else (0, 0)
    if lowest < 0 or highest >= pages:
        what = f"{where}: pages {lowest} to {highest}, the pool has pages 0 to {pages - 1}"
        raise InputError(what, hint="pass page numbers, not token slots")


def _check_held(side: str, space: Space, tokens: tuple[int, int, int], given: PageList) -> None:
    """Refuse a list that does not hold the slots of the tokens [lo, hi) of a request."""
    lo, hi, num_tokens = tokens
    first, end = slots_below(space, lo, num_tokens), slots_below(space, hi, num_tokens)
    last = given.first_slot + len(given.indices) * space.page_tokens
    if first < end and not given.first_slot <= first <= end <= last:
        held = f"holds slots {given.first_slot} to {last - 1}" if len(given.indices) else "is empty"
        what = f"{side} page list of space {space.name!r} {held}, the request needs slots {first} to {end - 1}"
        raise InputError(what, hint="num_pages() and first_slot() say what a list must hold")


def _physical(pages: PageList, slot: I64, page_tokens: int) -> I64:
    page, offset = np.divmod(slot - pages.first_slot, page_tokens)
    return pages.indices[page].astype(np.int64) * page_tokens + offset
