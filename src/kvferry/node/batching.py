"""From an effect of the book to batches for the engine. Runs on the mover's thread."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvferry.layout import Space, extent, first_slot
from kvferry.plan import SMALL_BYTES, Batch, Limits, PageList, Part, Route, batches, runs, small_batch
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
    parts = [_part(route, space, submit) for space in route.spaces if space in submit.chunk.pages]
    names = {"claim": submit.info.claim, "chunk": submit.chunk.number}
    if (submit.info.expected_bytes or SMALL_BYTES + 1) <= min(SMALL_BYTES, limits.bytes):
        batch = small_batch(route, parts, **names)
        if batch is not None and len(batch) <= limits.rows:
            return iter((batch,))
    return batches(route, [runs(route, part) for part in parts], limits, **names)


def _part(route: Route, space: str, submit: Submit) -> Part:
    leg, info, end = route.leg(space), submit.info, submit.end_tokens
    source = unpack_pages(submit.chunk.pages[space]).astype(np.int64)
    target = unpack_pages(info.pages.get(space, b"")).astype(np.int64)
    rows = 0 if space == MAIN else len(target)
    begin = page_list_begin(leg.src, submit.first_token, end, rows)
    if space == MAIN:
        begin += submit.chunk.first_page * leg.src.page_tokens
    there = page_list_begin(leg.dst, info.prefix_tokens, end, rows)
    return Part(space, info.prefix_tokens, end, PageList(source, begin), PageList(target, there), rows)


def page_list_begin(space: Space, from_token: int, end_tokens: int, rows: int) -> int:
    """The slot that a page list from `from_token` on starts with."""
    lo, _ = extent(space, min(from_token, end_tokens), end_tokens, rows)
    return first_slot(space, lo, end_tokens)
