"""How many rows the planner's batches hold for a request whose pages are scattered over both pools."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from kvferry.layout import Space, list_begin, num_pages
from kvferry.plan import Leg, Limits, PageList, Part, Route, batches, runs


class Count(NamedTuple):
    """Of one leg."""

    rows: int
    bytes: int


class RowCounter:
    """Counts by planning; legs that differ in nothing but addresses are planned once."""

    def __init__(self, prefix_tokens: int, num_tokens: int) -> None:
        self._prefix, self._tokens = prefix_tokens, num_tokens
        self._known: dict[Hashable, Count] = {}

    def count(self, route: Route, space: str) -> Count:
        """Rows and bytes that move in a space."""
        leg = route.leg(space)
        shape = _shape(leg)
        if shape not in self._known:
            self._known[shape] = self._planned(route, leg)
        return self._known[shape]

    def _planned(self, route: Route, leg: Leg) -> Count:
        space = leg.dst.name
        pages = (self._scattered(leg.src, leg.pages[0], 0, 0), self._scattered(leg.dst, leg.pages[1], self._prefix, 1))
        found = runs(route, Part(space, self._prefix, self._tokens, *pages))
        rows = nbytes = 0
        for batch in batches(route, [found], Limits()):
            rows, nbytes = rows + len(batch), nbytes + batch.total_bytes
        return Count(rows, nbytes)

    def _scattered(self, space: Space, pool_pages: int, from_token: int, seed: int) -> PageList:
        """Pages drawn from the whole pool, the same ones for every rank of a side."""
        needed = num_pages(space, from_token, self._tokens)
        drawn = np.random.default_rng(seed).permutation(pool_pages)[:needed]
        return PageList(drawn, list_begin(space, from_token, self._tokens, 0))


def _shape(leg: Leg) -> Hashable:
    """All of a leg but its addresses."""
    groups = [
        (each.nbytes.tobytes(), each.page, each.token, each.granule, each.dense, each.linear)
        for each in (*leg.pieces, *leg.page_pieces)
    ]
    return leg.src, leg.dst, leg.pages, len(leg.pieces), tuple(groups)
