"""Small requests: all but the page numbers is the same for requests of the same size, and is worked out once.

The general way (runs, batches) costs some 300 us of numpy calls, however small the request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvferry.layout.deal import I64, list_begin
from kvferry.plan.batch import Batch
from kvferry.plan.pattern import Pattern
from kvferry.plan.recent import Recent
from kvferry.plan.route import Leg, Route

SMALL_BYTES = 256 << 10
"""Of a request that is planned so."""


class Size(NamedTuple):
    """What a request's size is, for a leg.

    Attributes:
        first_token: the token that the source's page list begins with.
        prefix_tokens: tokens that decode already has.
        end_tokens: the token after the last one that moves.
        rows: number of rows, where the coverage is Rows.
    """

    first_token: int
    prefix_tokens: int
    end_tokens: int
    rows: int


class Recipe(NamedTuple):
    """What follows from the size.

    Attributes:
        pattern: the rows without their pages.
        total_bytes: of all rows.
        first_pages: the pages that both sides' lists begin with, counted from the page of slot 0.
    """

    pattern: Pattern
    total_bytes: int
    first_pages: tuple[int, int]


def recipe(leg: Leg, size: Size) -> Recipe | None:
    """The recipe of a small request; None where nothing moves. Raises InputError as `runs` does."""
    known: Recent[Recipe | None] = leg.noted("recipes", Recent)
    return known.get(size, lambda: _recipe(leg, size), lambda _: True)


def _recipe(leg: Leg, size: Size) -> Recipe | None:
    first_token, prefix, end, rows = size
    lo, hi = leg.extent(prefix, end, rows)
    if hi <= lo or not len(leg.overlap(lo, hi, end).tokens):
        return None
    begins = (list_begin(leg.src, first_token, end, rows), list_begin(leg.dst, prefix, end, rows))
    src, dst = (begin // tokens for begin, tokens in zip(begins, leg.page_tokens, strict=True))
    made = leg.pattern(lo, hi, end)
    return Recipe(made, int(made.nbytes.sum()), (src, dst))


def small_batch(
    route: Route, sizes: dict[str, Size], src: dict[str, I64], dst: dict[str, I64], *, claim: int = 0, chunk: int = 0
) -> Batch | None:
    """The rows of a small request that is sent in one chunk.

    Args:
        route: of the two ranks.
        sizes: of the request, per space.
        src: int64[P] page numbers of the source, per space.
        dst: int64[P] page numbers of the destination, per space.
        claim: the claim that grants the destination's pages.
        chunk: number of the chunk.

    Returns:
        None where `runs` must be asked: the pages are not what they should be, and it says why.

    Raises:
        InputError: the numbers make no request, as in `runs`.
    """
    columns: list[tuple[I64, I64, I64]] = []
    total_bytes = 0
    for space, size in sizes.items():
        leg = route.leg(space)
        found = recipe(leg, size)
        if found is None:
            return None
        pattern, (here, there) = found.pattern, found.first_pages
        total_bytes += found.total_bytes
        if not (_fits(leg, pattern, 0, src[space], here) and _fits(leg, pattern, 1, dst[space], there)):
            return None
        columns.append(
            (pattern.addresses(0, src[space], here), pattern.addresses(1, dst[space], there), pattern.nbytes)
        )
    if not columns:
        return None
    rows = columns[0] if len(columns) == 1 else [np.concatenate(column) for column in zip(*columns, strict=True)]
    at, to, nbytes = (column.view(np.uint64) for column in rows)
    return Batch(at, to, nbytes, total_bytes, claim, chunk)


def _fits(leg: Leg, pattern: Pattern, side: int, pages: I64, first_page: int) -> bool:
    """Whether a page list holds all pages of the pattern, and they exist."""
    low, high = pattern.pages[side]
    numbers = pages.tolist()
    return first_page <= low and high < first_page + len(numbers) and _within(numbers, leg.pages[side])


def _within(numbers: list[int], count: int) -> bool:
    return min(numbers) >= 0 and max(numbers) < count
