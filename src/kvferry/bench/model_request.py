"""The geometry of --model: a preset's request between two grids, every element of it told from every other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvferry.bench.geometry import I32, U8, Share, pool_bytes_of
from kvferry.bench.model_case import ModelCase, layouts, moved
from kvferry.bench.positions import first_page, held, page_count
from kvferry.bench.strided import GUARD, Listed, Places, field_numbers, places
from kvferry.bench.transfer_spec import TransferSpec
from kvferry.layout import Layout

MAIN = "kv"
UNUSED = np.uint64(0x5C5C_A3A3_3A3A_C5C5)
"""What lies in prefill's memory beside the request; the guard of decode's memory is another one."""
_BLOCK_WORDS = 1 << 17


class ModelRequest:
    """See `Geometry`. The bytes of an element follow from what it is, so that it is known wherever it lies."""

    def __init__(self, spec: TransferSpec, case: ModelCase) -> None:
        self._spec, self._case = spec, case
        self.tokens: int | None = case.tokens
        self._layouts = {side: layouts(case, side, spec.inflight) for side in ("prefill", "decode")}
        self._numbers = field_numbers(self._layouts["prefill"])
        self._pages = {side: [self._page_lists(side, rank) for rank in found] for side, found in self._layouts.items()}

    def layouts(self, side: str) -> list[Layout]:
        """Of all ranks of the grid."""
        return self._layouts[side]

    def pool_bytes(self, side: str) -> list[int]:
        """One pool for each rank."""
        return [pool_bytes_of(layout) for layout in self._layouts[side]]

    def shares(self, side: str) -> list[Share]:
        """Every rank has a part of every request."""
        return [
            Share(rank, room, lists.get(MAIN, np.zeros(0, np.int32)), {k: v for k, v in lists.items() if k != MAIN})
            for rank, rooms in enumerate(self._pages[side])
            for room, lists in enumerate(rooms)
        ]

    def begin(self, side: str, pools: Sequence[U8]) -> None:
        """One word all over, another on each side."""
        for pool in pools:
            pool.view(np.uint64)[:] = UNUSED if side == "prefill" else GUARD

    def fill(self, pools: Sequence[U8], round_number: int) -> None:
        """Write each element of each request, on every rank that holds it."""
        for _, each in self._places("prefill", pools):
            each.write(round_number)

    def check(self, pools: Sequence[U8], round_number: int) -> str:
        """Compare each element that decode wants, put the guard's word there, and look that nothing else is left."""
        for rank, each in self._places("decode", pools):
            if wrong := each.take(round_number):
                return f"round {round_number}: rank {self._layouts['decode'][rank].rank}: {wrong}"
        for rank, pool in enumerate(pools):
            at = _first_other(pool)
            if at >= 0:
                where = f"byte {at} of the memory of rank {self._layouts['decode'][rank].rank}"
                return f"round {round_number}: {where} differs, which belongs to no request"
        return ""

    def _places(self, side: str, pools: Sequence[U8]) -> Iterator[tuple[int, Places]]:
        """All elements of all requests, rank by rank."""
        rooms = self._spec.inflight
        for rank, layout in enumerate(self._layouts[side]):
            for room in range(rooms):
                lists = {space.name: self._listed(side, rank, room, space.name) for space in layout.spaces}
                for each in places(layout, pools[rank], lists, self._numbers, room, rooms, self._case.tokens):
                    yield rank, each

    def _listed(self, side: str, rank: int, room: int, name: str) -> Listed:
        layout = self._layouts[side][rank]
        space = next(each for each in layout.spaces if each.name == name)
        whole = held(space, self._case.tokens)
        found = whole if side == "prefill" else moved(self._case, space)
        return Listed(found, self._pages[side][rank][room][name], first_page(space, whole))

    def _page_lists(self, side: str, layout: Layout) -> list[dict[str, I32]]:
        """The lists of each request in flight: pages of each space's pool in the order that was asked for."""
        found: list[dict[str, I32]] = [{} for _ in range(self._spec.inflight)]
        for number, space in enumerate(layout.spaces):
            count = page_count(space, held(space, self._case.tokens))
            pool = max((tensor.pages for tensor in layout.tensors if tensor.space == space.name), default=0)
            chosen = self._chosen(side, (layout.rank.pp, layout.rank.cp, layout.rank.tp, number), count, pool)
            for room, lists in enumerate(found):
                lists[space.name] = chosen[room * count : (room + 1) * count]
        return found

    def _chosen(self, side: str, seeds: Sequence[int], count: int, pool: int) -> I32:
        """The pages of all requests in one pool, a guard before and behind them or between them."""
        needed = count * self._spec.inflight
        if self._spec.order == "shuffle":
            random = np.random.default_rng((self._spec.seed, side == "decode", *seeds))
            return random.permutation(max(pool, needed))[:needed].astype(np.int32)
        pages = np.arange(needed, dtype=np.int32) + (max(pool - needed, 0)) // 2
        return pages[::-1].copy() if self._spec.order == "reverse" and side == "decode" else pages


def _first_other(pool: U8) -> int:
    """The first byte of a word that is not the guard's; -1 if there is none."""
    words = pool.view(np.uint64)
    for begin in range(0, len(words), _BLOCK_WORDS):
        other = words[begin : begin + _BLOCK_WORDS] != GUARD
        if other.any():
            return 8 * (begin + int(other.argmax()))
    return -1
