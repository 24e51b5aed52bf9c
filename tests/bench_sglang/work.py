"""The work that all contestants get: pools, page lists, bytes that tell where they came from, one comparison."""

from __future__ import annotations

import time

import msgspec
import numpy as np

from kvferry.bench.pattern import fill, first_difference
from kvferry.pool import allocate_pool

AUX_BYTES = (64, 64, 64, 64, 512, 512, 64, 128, 8192, 64)
"""Metadata of one request, as a server of SGLang with a hidden size of 4096 has it."""
AUX_ROWS = 8
PAGE_TOKENS = 16


class Work(msgspec.Struct, frozen=True):
    """One kind of request.

    Attributes:
        name: how it is shown.
        layers: regions, each with pages of its own.
        pages: pages of the request, which are all pages of the pool.
        page_bytes: bytes of a page of one layer.
        nap_us: sleep between two polls of both schedulers; 0 gives the processor away and goes on.
        forward_s: between naming pages and sending, where a forward pass is in reality, for all contestants.
        burst: requests of a turn, one after the other; the first one is counted apart: its contestant has rested.
    """

    name: str
    layers: int
    pages: int
    page_bytes: int
    nap_us: float
    forward_s: float
    burst: int

    @property
    def nbytes(self) -> int:
        return self.layers * self.pages * self.page_bytes

    def page_list(self, side: str, order: str, round_number: int) -> np.ndarray:
        """int32[pages]; shuffled anew in each round, and otherwise on the two sides."""
        if order == "contiguous":
            return np.arange(self.pages, dtype=np.int32)
        random = np.random.default_rng((round_number, side == "decode"))
        return random.permutation(self.pages).astype(np.int32)


class Memory:
    """One side's pools, a region per layer, on huge pages where the system has them; and its metadata."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.regions = [allocate_pool(work.pages * work.page_bytes) for _ in range(work.layers)]
        self.aux = [np.zeros((AUX_ROWS, nbytes), np.uint8) for nbytes in AUX_BYTES]

    def fill(self, round_number: int) -> None:
        """Write what only this round has."""
        words = self.work.pages * self.work.page_bytes // 8
        for layer, region in enumerate(self.regions):
            fill(region.array.view(np.uint64), round_number, layer * words)
        for buffer in self.aux:
            buffer[0] = round_number % 251 + 1

    def check(self, order: str, round_number: int) -> str:
        """Compare all pages and the metadata; what is wrong, in words, or ""."""
        work = self.work
        words = work.page_bytes // 8
        pairs = [work.page_list(side, order, round_number).tolist() for side in ("prefill", "decode")]
        for layer, region in enumerate(self.regions):
            rows = region.array.view(np.uint64).reshape(work.pages, words)
            for source, target in zip(*pairs, strict=True):
                first = (layer * work.pages + source) * words
                if first_difference(rows[target], round_number, first) >= 0:
                    return f"page {target} of layer {layer} is not page {source} of round {round_number}"
        wrong = [number for number, buffer in enumerate(self.aux) if (buffer[0] != round_number % 251 + 1).any()]
        return f"metadata {wrong} differ" if wrong else ""


def poll_until(poll, wanted, failed, nap_us: float, limit_s: float = 60.0) -> None:
    """Poll as a scheduler does until the state is the wanted one. Raises RuntimeError if it fails or takes too long."""
    until_s = time.monotonic() + limit_s
    while (state := poll()) != wanted:
        if state == failed or time.monotonic() > until_s:
            raise RuntimeError(f"the room is {state}, {wanted} was awaited")
        time.sleep(nap_us / 1e6)
