"""Batches: pieces times runs, expanded lazily into bounded arrays of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.layout.deal import I64
from kvferry.plan.batch import Batch, Limits
from kvferry.plan.pieces import Pieces
from kvferry.plan.route import Leg, Route
from kvferry.plan.runs import Runs


class _Rows(NamedTuple):
    src: I64
    dst: I64
    nbytes: I64


def batches(route: Route, runs: Sequence[Runs], limits: Limits, *, claim: int = 0, chunk: int = 0) -> Iterator[Batch]:
    """Expand runs to rows, at most limits.rows and limits.bytes in a batch; a longer row is split.

    Args:
        route: of the two ranks.
        runs: of one chunk, one entry per space.
        limits: the engine's.
        claim: the claim that grants the destination's pages.
        chunk: number of the chunk.

    Yields:
        Batches with arrays of their own, all but the last filled up to a limit.

    Raises:
        InputError: a limit is not positive.
    """
    if limits.rows < 1 or limits.bytes < 1:
        raise InputError(f"limits: rows {limits.rows}, bytes {limits.bytes}", hint="both must be at least 1")
    left, left_bytes = _Rows(*np.empty((3, 0), np.int64)), 0
    for block in _blocks(route, runs, limits.rows):
        rows = _joined_rows(left, _split(block, limits.bytes))
        src, dst, nbytes = (column.view(np.uint64) for column in rows)
        ends = np.cumsum(rows.nbytes)
        at = done = 0
        cuts = _cuts(rows.nbytes, ends, limits)
        for end, size in zip(cuts, np.diff(ends[np.array(cuts, int) - 1], prepend=0).tolist(), strict=True):
            yield Batch(src[at:end], dst[at:end], nbytes[at:end], size, claim, chunk)
            at, done = end, done + size
        left = _Rows(*(column[at:] for column in rows))
        left_bytes = int(ends[-1]) - done if len(ends) else 0
    if left_bytes:
        src, dst, nbytes = (column.view(np.uint64) for column in left)
        yield Batch(src, dst, nbytes, left_bytes, claim, chunk)


def _cuts(nbytes: I64, ends: I64, limits: Limits) -> list[int]:
    """Where full batches end; what comes after the last one may still be added to."""
    if len(nbytes) and (nbytes == nbytes[0]).all():
        step = min(limits.rows, limits.bytes // int(nbytes[0]))
        return list(range(step, len(nbytes) + 1, step))
    cuts: list[int] = []
    at = done = 0
    while at < len(ends):
        at = min(int(ends.searchsorted(done + limits.bytes, "right")), at + limits.rows)
        if at == len(ends) and at - (cuts[-1] if cuts else 0) < limits.rows:
            break
        cuts.append(at)
        done = int(ends[at - 1])
    return cuts


def _joined_rows(left: _Rows, rows: _Rows) -> _Rows:
    if not len(left.nbytes):
        return rows
    return _Rows(*(np.concatenate(columns) for columns in zip(left, rows, strict=True)))


def _split(rows: _Rows, most_bytes: int) -> _Rows:
    """Cut rows longer than most_bytes."""
    if not len(rows.nbytes) or rows.nbytes.max() <= most_bytes:
        return rows
    parts = -(-rows.nbytes // most_bytes)
    offset = _counted(parts) * most_bytes
    src, dst, left = (np.repeat(column, parts) for column in rows)
    return _Rows(src + offset, dst + offset, np.minimum(left - offset, most_bytes))


def _blocks(route: Route, runs: Sequence[Runs], most_rows: int) -> Iterator[_Rows]:
    for part in runs:
        leg = route.leg(part.space)
        whole = part.tokens == leg.dst.page_tokens if leg.page_pieces else np.zeros(len(part.tokens), bool)
        for pieces in leg.pieces:
            by_page = pieces.dense and not pieces.linear
            yield from _product(pieces, _spans(leg, pieces, _only(part, ~whole) if by_page else part), most_rows)
        for pieces in leg.page_pieces:
            yield from _product(pieces, _spans(leg, pieces, _only(part, whole)), most_rows)


def _only(runs: Runs, chosen: npt.NDArray[np.bool_]) -> Runs:
    return Runs(runs.space, runs.src_slot[chosen], runs.dst_slot[chosen], runs.tokens[chosen])


def _spans(leg: Leg, pieces: Pieces, runs: Runs) -> _Rows:
    """Where the runs lie, relative to a piece's base; `nbytes` counts contiguous granules here."""
    src, dst, tokens = runs.src_slot, runs.dst_slot, runs.tokens
    if pieces.linear:
        src, dst, tokens = _joined(src, dst, tokens)
    count = -(-tokens // pieces.granule)
    if not pieces.dense:
        step = _counted(count) * pieces.granule
        src, dst = np.repeat(src, count) + step, np.repeat(dst, count) + step
        count = np.ones_like(src)
    sides = (src, leg.src.page_tokens), (dst, leg.dst.page_tokens)
    src, dst = (_offset(*side, pieces.granule, pieces.page[i], pieces.token[i]) for i, side in enumerate(sides))
    return _Rows(src, dst, count)


def _offset(slot: I64, page_tokens: int, granule: int, page_stride: int, token_stride: int) -> I64:
    page, inside = np.divmod(slot, page_tokens)
    return np.asarray(page * page_stride + inside // granule * token_stride)


def _joined(src: I64, dst: I64, tokens: I64) -> tuple[I64, I64, I64]:
    """Join runs that go on where the one before ends, on both sides."""
    ends = (np.diff(src) == tokens[:-1]) & (np.diff(dst) == tokens[:-1])
    first = np.flatnonzero(np.append(True, ~ends)[: len(src)])
    joined = np.add.reduceat(tokens, first) if len(first) else tokens
    return src[first], dst[first], joined


def _product(pieces: Pieces, spans: _Rows, most_rows: int) -> Iterator[_Rows]:
    """Every piece at every span, in blocks of at most most_rows rows.

    The inner axis is the one along which memory is closer: spans where pages follow each other, else pieces.
    """
    piece = _Rows(pieces.base[0], pieces.base[1], pieces.nbytes)
    outer, inner = (piece, spans) if pieces.linear else (spans, piece)
    width = max(min(len(inner.src), most_rows), 1)
    height = most_rows // width
    for i in range(0, len(outer.src), height):
        a = [column[i : i + height, None] for column in outer]
        for j in range(0, len(inner.src), width):
            b = [column[j : j + width] for column in inner]
            yield _Rows((a[0] + b[0]).ravel(), (a[1] + b[1]).ravel(), (a[2] * b[2]).ravel())


def _counted(counts: I64) -> I64:
    """0, 1, ... counts[i] - 1 for each i, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
