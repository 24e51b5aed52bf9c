"""Page index lists, as connectors group them."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError

Index = TypeVar("Index", np.int32, np.int64)


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
