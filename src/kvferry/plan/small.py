"""Requests of few rows: all but the page numbers is the same for requests of the same size, and is worked out once.

The general way (runs, batches) costs some 300 us of numpy calls, however small the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.layout.deal import I64, list_begin
from kvferry.plan.batch import U64, Batch
from kvferry.plan.pattern import Pattern
from kvferry.plan.recent import Recent
from kvferry.plan.route import Leg, Route

SMALL_BYTES = 256 << 10
"""Of a request whose rows are not joined where pages follow each other, since looking costs more than it brings, and
whose places of a digest are kept by its size."""

RECIPE_ROWS = 1024
"""Of a request that is planned so: 56 bytes are kept for each."""


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
    """The recipe of a request; None where nothing moves, or too much. Raises InputError as `runs` does."""
    known: Recent[Recipe | None] = leg.noted("recipes", Recent)
    return known.get(size, lambda: _recipe(leg, size), lambda _: True)


def _recipe(leg: Leg, size: Size) -> Recipe | None:
    first_token, prefix, end, rows = size
    lo, hi = leg.extent(prefix, end, rows)
    if hi <= lo or not 0 < leg.most_rows(lo, hi, end) <= RECIPE_ROWS:
        return None
    begins = (list_begin(leg.src, first_token, end, rows), list_begin(leg.dst, prefix, end, rows))
    src, dst = (begin // tokens for begin, tokens in zip(begins, leg.page_tokens, strict=True))
    made = leg.pattern(lo, hi, end)
    return Recipe(made, int(made.nbytes.sum()), (src, dst))


class Target(NamedTuple):
    """The rows of a request of few rows, but for the source's pages.

    Attributes:
        parts: per space: its name, leg, pattern, and the page that the source's list begins with.
        dst: uint64[N] addresses at the destination.
        nbytes: uint64[N] lengths.
        total_bytes: their sum.
        follows: bool[N - 1] whether a row's end is the next one's begin there; None where it is not worth to look.
    """

    parts: tuple[tuple[str, Leg, Pattern, int], ...]
    dst: U64
    nbytes: U64
    total_bytes: int
    follows: npt.NDArray[np.bool_] | None


def small_target(route: Route, sizes: Mapping[str, Size], dst: Mapping[str, I64]) -> Target | None:
    """Make all of a request of few rows that can be made without the source's pages.

    Args:
        route: of the two ranks.
        sizes: of the request, per space.
        dst: int64[P] page numbers of the destination, per space.

    Returns:
        None where `runs` must be asked: the rows are many, or the pages are not what they should be, and it says why.

    Raises:
        InputError: the numbers make no request, as in `runs`.
    """
    parts: list[tuple[str, Leg, Pattern, int]] = []
    columns: list[tuple[I64, I64]] = []
    total_bytes = 0
    for space, size in sizes.items():
        leg = route.leg(space)
        found = recipe(leg, size)
        if found is None:
            return None
        pattern, (here, there) = found.pattern, found.first_pages
        if not _fits(leg, pattern, 1, dst[space], there):
            return None
        total_bytes += found.total_bytes
        parts.append((space, leg, pattern, here))
        columns.append((pattern.addresses(1, dst[space], there), pattern.nbytes))
    if not parts:
        return None
    to, nbytes = columns[0] if len(columns) == 1 else map(np.concatenate, zip(*columns, strict=True))
    follows = np.diff(to) == nbytes[:-1] if total_bytes > SMALL_BYTES else None
    worth = follows is not None and 4 * int(np.count_nonzero(follows)) > len(to)
    return Target(tuple(parts), to.view(np.uint64), nbytes.view(np.uint64), total_bytes, follows if worth else None)


def small_batch(target: Target, src: Mapping[str, I64], *, claim: int = 0, chunk: int = 0) -> Batch | None:
    """The rows of a request that is sent in one chunk.

    Args:
        target: all but the source's pages.
        src: int64[P] page numbers of the source, per space.
        claim: the claim that grants the destination's pages.
        chunk: number of the chunk.

    Returns:
        None where `runs` must be asked: the pages are not what they should be, and it says why.
    """
    columns: list[I64] = []
    for space, leg, pattern, first_page in target.parts:
        pages = src[space]
        if not _fits(leg, pattern, 0, pages, first_page):
            return None
        columns.append(pattern.addresses(0, pages, first_page))
    at = (columns[0] if len(columns) == 1 else np.concatenate(columns)).view(np.uint64)
    dst, nbytes = target.dst, target.nbytes
    if target.follows is not None:
        begins = np.append(True, ~(target.follows & (np.diff(at) == nbytes[:-1])))
        first = np.flatnonzero(begins)
        at, dst, nbytes = at[first], dst[first], np.add.reduceat(nbytes, first)
    return Batch(at, dst, nbytes, target.total_bytes, claim, chunk)


def _fits(leg: Leg, pattern: Pattern, side: int, pages: I64, first_page: int) -> bool:
    """Whether a page list holds all pages of the pattern, and they exist."""
    low, high = pattern.pages[side]
    numbers = pages.tolist()
    return first_page <= low and high < first_page + len(numbers) and _within(numbers, leg.pages[side])


def _within(numbers: list[int], count: int) -> bool:
    return min(numbers) >= 0 and max(numbers) < count
