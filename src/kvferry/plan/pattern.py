"""Small requests: the rows of a request of a given size, but for the pages, which only add their multiples.

The general way (runs, batches) costs some 200 us of numpy calls, however small the request. Of requests of the same
size all but the page numbers is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.layout.deal import I64
from kvferry.plan.overlap import Overlap
from kvferry.plan.pieces import Pieces


class Pattern(NamedTuple):
    """Rows without their pages. Index 0 is the source, 1 the destination.

    Attributes:
        offset: int64[2, N] address, had the row's page the number 0.
        page: int64[2, N] which page of the request, counted from the page of slot 0.
        stride: int64[2, N] bytes from page to page.
        nbytes: int64[N] length.
        pages: (first, last) page that is needed, on both sides.
    """

    offset: I64
    page: I64
    stride: I64
    nbytes: I64
    pages: tuple[tuple[int, int], tuple[int, int]]

    def addresses(self, side: int, numbers: I64, first_page: int) -> I64:
        """int64[N], given one side's page numbers from first_page on."""
        page = self.page[side] - first_page if first_page else self.page[side]
        return np.asarray(self.offset[side] + numbers[page] * self.stride[side])


def pattern(groups: Sequence[Pieces], found: Overlap, page_tokens: tuple[int, int]) -> Pattern:
    """Make the pattern of a request.

    Args:
        groups: of the leg's pieces.
        found: all tokens that move, cut at pages; at least one.
        page_tokens: of the source and of the destination.
    """
    parts = [_rows(group, found, page_tokens) for group in groups]
    offset, page, stride, nbytes = (np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
    offset, page, stride, nbytes = _in_order(np.lexsort((offset[0], page[0])), offset, page, stride, nbytes)
    same = np.all((np.diff(page) == 0) & (np.diff(stride) == 0) & (np.diff(offset) == nbytes[:-1]), axis=0)
    first = np.flatnonzero(np.append(True, ~same))
    offset, page, stride = offset[:, first], page[:, first], stride[:, first]
    nbytes = np.add.reduceat(nbytes, first)
    if 2 * np.count_nonzero((stride == nbytes).all(axis=0)) > len(nbytes):  # where pages follow each other, rows do too
        offset, page, stride, nbytes = _in_order(np.lexsort((page[0], offset[0])), offset, page, stride, nbytes)
    (src_low, dst_low), (src_high, dst_high) = page.min(axis=1).tolist(), page.max(axis=1).tolist()
    bounds = ((src_low, src_high), (dst_low, dst_high))
    return Pattern(offset, page, stride, nbytes, bounds)


def _in_order(order: I64, *columns: I64) -> tuple[I64, ...]:
    return tuple(column[..., order] for column in columns)


def _rows(group: Pieces, found: Overlap, page_tokens: tuple[int, int]) -> tuple[I64, I64, I64, I64]:
    slots = np.stack([found.src_slot, found.dst_slot])
    count = -(-found.tokens // group.granule)
    if not group.dense:
        ends = np.cumsum(count)
        step = (np.arange(int(ends[-1])) - np.repeat(ends - count, count)) * group.granule
        slots = np.repeat(slots, count, axis=1) + step
        count = np.ones_like(step)
    sizes, tokens, pages = (np.array(each, np.int64)[:, None] for each in (page_tokens, group.token, group.page))
    page, inside = np.divmod(slots, sizes)
    offset = group.base[:, :, None] + (inside // group.granule * tokens)[:, None, :]
    shape = offset.shape
    nbytes = (group.nbytes[:, None] * count).reshape(-1)
    spread = (np.broadcast_to(each, shape).reshape(2, -1) for each in (page[:, None, :], pages[:, :, None]))
    return (offset.reshape(2, -1), *spread, nbytes)  # type: ignore[return-value]
