"""From an effect of the book to batches for the engine. Runs on the mover's thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kvferry.layout import list_begin
from kvferry.layout.deal import I64
from kvferry.plan import SMALL_BYTES, Batch, Limits, PageList, Part, Route, Size, batches, runs, small_batch
from kvferry.proto.effects import Submit
from kvferry.wire import unpack_pages

MAIN = "kv"
"""The space that a sender's kv_indices index; its chunks are windows of the offer's page list."""


def chunk_batches(route: Route, submit: Submit, limits: Limits) -> Iterator[Batch]:
    """The rows of one chunk for one claim, in bounded batches, expanded as they are taken.

    Args:
        route: of the two ranks.
        submit: chunk, claim and the request's numbers.
        limits: of one batch.

    Raises:
        InputError: a page index outside a pool, or fewer pages than the request needs, naming the side.
    """
    names = {"claim": submit.info.claim, "chunk": submit.chunk.number}
    chunk, info = submit.chunk, submit.info
    # lists of state spaces come whole with the last chunk; one that is not there must be missed
    spaces = [space for space in route.spaces if space in chunk.pages or (chunk.last and space != MAIN)]
    if (
        not chunk.first_page
        and chunk.last
        and (info.expected_bytes or SMALL_BYTES + 1) <= min(SMALL_BYTES, limits.bytes)
    ):
        src, dst = ({space: numbers(each, space) for space in spaces} for each in (chunk.pages, info.pages))
        sizes = {
            space: size_of(space, submit.first_token, info.prefix_tokens, submit.end_tokens, dst) for space in spaces
        }
        batch = small_batch(route, sizes, src, dst, **names)
        if batch is not None and len(batch) <= limits.rows:
            return iter((batch,))
    return batches(route, [runs(route, _part(route, space, submit)) for space in spaces], limits, **names)


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
