"""The geometry of --layers, --pages and --page-bytes: one rank on each side, one space, pages in a chosen order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.bench.geometry import U8, Share
from kvferry.bench.pattern import fill, first_difference
from kvferry.bench.transfer_spec import TransferSpec, layout_of, rows_of, shares, source_pages, target_pages
from kvferry.layout import Layout

GUARD_ROUND = (1 << 63) + 1
"""The pattern of pages that nothing is ever sent to; no round of a measurement has this number."""


class FixedPages:
    """See `Geometry`. Each word of a pool is told by its place in it; a page keeps the words of where it came from."""

    tokens: int | None = None

    def __init__(self, spec: TransferSpec) -> None:
        self.spec = spec
        self.source, self.target = source_pages(spec), target_pages(spec)
        self.guards = np.setdiff1d(np.arange(spec.pool_pages), self.target)

    def layouts(self, side: str) -> list[Layout]:  # noqa: ARG002 - both sides have the same
        """One rank."""
        return [layout_of(self.spec)]

    def pool_bytes(self, side: str) -> list[int]:  # noqa: ARG002
        """One pool."""
        return [self.spec.pool_bytes]

    def shares(self, side: str) -> list[Share]:
        """The pages of each request in flight."""
        pages = self.source if side == "prefill" else self.target
        return [Share(0, room, part, {}) for room, part in enumerate(shares(self.spec, pages))]

    def begin(self, side: str, pools: Sequence[U8]) -> None:
        """A pattern of its own for each side."""
        fill(self._words(pools), 0 if side == "prefill" else GUARD_ROUND)

    def fill(self, pools: Sequence[U8], round_number: int) -> None:
        """The round's pattern, in pages of the request and in all others."""
        fill(self._words(pools), round_number)

    def check(self, pools: Sequence[U8], round_number: int) -> str:
        """Compare each page with the page of the source that it came from, or with what was there before."""
        rows = rows_of(self.spec, pools[0])
        source = dict(zip(self.target.tolist(), self.source.tolist(), strict=True))
        pages, words = rows.shape[1:]
        for tensor, page in np.ndindex(len(rows), pages):
            expected_page = source.get(page, page)
            pattern = round_number if page in source else GUARD_ROUND
            at = first_difference(rows[tensor, page], pattern, (tensor * pages + expected_page) * words)
            if at >= 0:
                what = (
                    f"which holds page {source[page]} of the source" if page in source else "which belongs to no room"
                )
                return (
                    f"round {round_number}: byte {8 * at} of page {page}, tensor {tensor}, differs; "
                    f"the page is one {what}: found {int(rows[tensor, page, at]):#018x}"
                )
        return ""

    def _words(self, pools: Sequence[U8]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return pools[0][: self.spec.pool_bytes].view(np.uint64)
