"""Page index lists, as connectors group them."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.layout.deal import segments
from kvferry.layout.space import Ranges, Space

Index = TypeVar("Index", np.int32, np.int64)
Pages = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def group_concurrent_contiguous(
    src: npt.NDArray[Index], dst: npt.NDArray[Index]
) -> tuple[list[npt.NDArray[Index]], list[npt.NDArray[Index]]]:
    """Split two page lists wherever either of them does not go on with the next page.

    Args:
        src: int[N] page numbers at the source.
        dst: int[N] page numbers at the destination.

    Returns:
        The groups of both lists; within a group both sides are consecutive.

    Raises:
        InputError: the lists differ in length.
    """
    if len(src) != len(dst):
        raise InputError(f"page lists: source has {len(src)} pages, destination {len(dst)}", hint="pass pairs")
    if not len(src):
        return [], []
    cuts = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    return np.split(src, cuts), np.split(dst, cuts)


def cp_rank_part(total_pages: int, cp_rank: int, cp_size: int) -> tuple[int, int]:
    """Positions [begin, end) of a CP rank's part of a page list, cut as the deal `Ranges(cp_size, (cp_rank,))` cuts it.

    Raises:
        InputError: no such rank, or a negative number of pages.
    """
    if not 0 <= cp_rank < cp_size or total_pages < 0:
        what = f"CP rank {cp_rank} of {cp_size}, {total_pages} pages"
        raise InputError(what, hint="0 <= cp_rank < cp_size, and no negative number of pages")
    space = Space(page_tokens=1, deal=Ranges(cp_size, (cp_rank,)))
    part = segments(space, 0, total_pages, total_pages)
    return (int(part.token[0]), int(part.token[0] + part.length[0])) if len(part.token) else (0, 0)
