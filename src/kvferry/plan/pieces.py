"""Pieces: what a route copies of each token, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.layout.deal import I64


@dataclass(frozen=True)
class Pieces:
    """Pieces with the same strides. Index 0 is the source, 1 the destination.

    Granule g of page p of piece k starts at base[:, k] + p * page + g * token.

    Attributes:
        base: int64[2, K] addresses.
        nbytes: int64[K] length of one granule.
        page: bytes from page to page.
        token: bytes from granule to granule.
        granule: tokens that one granule covers.
        dense: consecutive granules of a page are contiguous on both sides.
        linear: consecutive granules are contiguous on both sides, across pages too.
    """

    base: I64
    nbytes: I64
    page: tuple[int, int]
    token: tuple[int, int]
    granule: int
    dense: bool
    linear: bool
