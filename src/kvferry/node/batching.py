"""From an effect of the book to batches for the engine. Runs on the mover's thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvferry.errors import InputError
from kvferry.layout import Rows, list_begin
from kvferry.layout.deal import I64
from kvferry.plan import (
    Batch,
    Limits,
    PageList,
    Part,
    Route,
    Size,
    Target,
    batches,
    runs,
    small_batch,
    small_target,
)
from kvferry.proto.effects import Prepare, Submit
from kvferry.wire import unpack_pages, view_pages

MAIN = "kv"
"""The space that a sender's kv_indices index; its chunks are windows of the offer's page list."""

_MOST_LIST_BYTES = 4 * 4096
"""A longer page list is not of a request of few rows; it is not looked at on the way."""


def prepared(route: Route, effect: Prepare, limits: Limits) -> Target | None:
    """What can be made of a request before its source's pages are known; None where that is nothing.

    Args:
        route: of the two ranks, narrowed to what is sent.
        effect: the claim and the request's numbers.
        limits: of one batch.

    Raises:
        InputError: the numbers make no request.
        WireError: a page list is none.
    """
    return _target(route, route.spaces, effect) if 0 < effect.nbytes <= limits.bytes else None


def chunk_batches(route: Route, submit: Submit, limits: Limits, target: Target | None = None) -> Iterator[Batch]:
    """The rows of one chunk for one claim, in bounded batches, expanded as they are taken.

    Args:
        route: of the two ranks.
        submit: chunk, claim and the request's numbers.
        limits: of one batch.
        target: what was `prepared`.

    Raises:
        InputError: a page index outside a pool, or fewer pages than the request needs, naming the side.
    """
    names = {"claim": submit.info.claim, "chunk": submit.chunk.number}
    chunk = submit.chunk
    # lists of state spaces come whole with the last chunk; one that is not there must be missed
    spaces = [space for space in route.spaces if space in chunk.pages or (chunk.last and space != MAIN)]
    _check_rows(route, spaces, submit)
    if not chunk.first_page and chunk.last and 0 < (submit.info.expected_bytes or 0) <= limits.bytes:
        if target is None or len(target.parts) != len(spaces):
            target = _target(route, spaces, submit)
        batch = small_batch(target, _unchecked(chunk.pages, spaces), **names) if target is not None else None
        if batch is not None and len(batch) <= limits.rows:
            return iter((batch,))
    return batches(route, [runs(route, _part(route, space, submit)) for space in spaces], limits, **names)


def _check_rows(route: Route, spaces: Sequence[str], submit: Submit) -> None:
    """Row i goes to row i: as many here as there."""
    for space in spaces:
        here, there = len(submit.chunk.pages.get(space, b"")), len(submit.info.pages.get(space, b""))
        if here != there and isinstance(route.leg(space).dst.coverage, Rows):
            what = f"space {space!r}: prefill sends {here // 4} rows, decode has named {there // 4}"
            raise InputError(what, hint="pass as many rows in state_indices on both sides")


def _target(route: Route, spaces: Sequence[str], request: Prepare | Submit) -> Target | None:
    first, info, end = request.first_token, request.info, request.end_tokens
    if any(len(data) > _MOST_LIST_BYTES for data in info.pages.values()):
        return None
    dst = _unchecked(info.pages, spaces)
    return small_target(route, {space: size_of(space, first, info.prefix_tokens, end, dst) for space in spaces}, dst)


def _unchecked(pages: Mapping[str, bytes], spaces: Sequence[str]) -> dict[str, I64]:
    """Page numbers for `plan.small`, which finds what is wrong with one and leaves it to `runs` to say so."""
    return {space: view_pages(pages.get(space, b"")).astype(np.int64) for space in spaces}


def numbers(pages: Mapping[str, bytes], space: str) -> I64:
    """int64[P]: the page numbers of a space."""
    return unpack_pages(pages.get(space, b"")).astype(np.int64)


def size_of(space: str, first_token: int, prefix_tokens: int, end_tokens: int, dst: Mapping[str, I64]) -> Size:
    """The size of a request in one space, given the destination's page numbers."""
    return Size(first_token, prefix_tokens, end_tokens, 0 if space == MAIN else len(dst[space]))


def _part(route: Route, space: str, submit: Submit) -> Part:
    leg, info, end = route.leg(space), submit.info, submit.end_tokens
    source, target = numbers(submit.chunk.pages, space), numbers(info.pages, space)
    rows = 0 if space == MAIN else len(target)
    begin = list_begin(leg.src, submit.first_token, end, rows)
    if space == MAIN:
        begin += submit.chunk.first_page * leg.src.page_tokens
    there = list_begin(leg.dst, info.prefix_tokens, end, rows)
    return Part(space, info.prefix_tokens, end, PageList(source, begin), PageList(target, there), rows, space != MAIN)
