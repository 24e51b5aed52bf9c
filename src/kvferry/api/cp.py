"""Helpers by the names that SGLang's users know: which of a request's pages a context parallel (CP) rank sends.

There every CP rank lists all pages of a request, and sends one of cp_size consecutive parts of the list; the first
parts are one page longer where the pages can't be dealt out evenly. A rank that *stores* a part only declares it as
the deal `Ranges(cp_size, (cp_rank,), page_tokens)` of its space instead, and needs none of these.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.api.page_lists import Pages, cp_rank_part
from kvferry.errors import InputError


class HasCpRank(Protocol):
    """What is asked of a manager."""

    @property
    def attn_cp_rank(self) -> int:
        """The rank on the CP axis."""
        ...

    @property
    def attn_cp_size(self) -> int:
        """Ranks on the CP axis."""
        ...


def page_indices_to_cp_rank_page_indices(page_indices: Pages, total_pages: int, cp_rank: int, cp_size: int) -> Pages:
    """The pages of a request that a CP rank sends.

    Args:
        page_indices: int[P], all pages of the request in token order; they need not follow each other in the pool.
        total_pages: P.
        cp_rank: the rank.
        cp_size: ranks.

    Raises:
        InputError: a part of the list only, or no such rank.
    """
    if len(page_indices) != total_pages:
        raise InputError(
            f"{len(page_indices)} page indices of a request of {total_pages} pages",
            hint="pass all of them, or use filter_kv_indices_for_cp_rank for a chunk",
        )
    begin, end = cp_rank_part(total_pages, cp_rank, cp_size)
    return page_indices[begin:end]


def filter_kv_indices_for_cp_rank(
    kv_mgr: HasCpRank, kv_indices: Pages, index_slice: slice, total_pages: int | None = None
) -> tuple[Pages, slice]:
    """What a CP rank sends of one chunk.

    Args:
        kv_mgr: knows its CP rank and their number, as `KVManager` does.
        kv_indices: int[P], the chunk's pages.
        index_slice: where the chunk lies in the request's page list.
        total_pages: pages of the request; None: the chunk is all of it.

    Returns:
        The pages, and where they lie in the request's page list; an empty part lies at the chunk's start.

    Raises:
        InputError: the slice is not as long as the chunk, lies outside of the request, or has a step.
    """
    total = len(kv_indices) if total_pages is None else total_pages
    begin, end, step = index_slice.start or 0, total if index_slice.stop is None else index_slice.stop, index_slice.step
    if step not in {None, 1} or end - begin != len(kv_indices) or not 0 <= begin <= end <= total:
        raise InputError(
            f"chunk of {len(kv_indices)} pages at {index_slice} of a request of {total} pages",
            hint="the slice says where the chunk lies in the request's page list",
        )
    first, last = cp_rank_part(total, kv_mgr.attn_cp_rank, kv_mgr.attn_cp_size)
    low, high = max(first, begin), min(last, end)
    if low >= high:
        return kv_indices[:0], slice(begin, begin)
    return kv_indices[low - begin : high - begin], slice(low, high)
