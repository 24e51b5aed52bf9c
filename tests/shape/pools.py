"""A rank's KV pool with guards, and the bytes that a request's KV cache consists of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry import KVArgs, request_tag
from kvferry.ids import Rank
from kvferry.layout import Layout
from kvferry.presets import layer_major, page_major

LAYERS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 3, 4, 8, 16
HEAD_BYTES = 2 * HEAD_DIM
FREE, CACHED, RELEASED = 0xEE, 0x5A, 0xDD
"""What a page holds that nobody owns, that decode has from its prefix cache, that prefill has given back."""

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Request:
    """What both schedulers get from the router."""

    room: int
    tokens: tuple[int, ...]
    decode_prefix: int = 0

    @property
    def tag(self) -> int:
        return request_tag(self.tokens)

    @property
    def first_output(self) -> int:
        return sum(self.tokens) % 32000

    def kv(self) -> U8:
        """uint8[token, layer, k|v, head, byte]: never FREE, CACHED or RELEASED in whole."""
        shape = (len(self.tokens), LAYERS, 2, KV_HEADS, HEAD_BYTES)
        return np.random.default_rng([self.room, self.tag]).integers(0, 256, shape, np.uint8)


def make_request(room: int, num_tokens: int, decode_prefix: int = 0, seed: int = 0) -> Request:
    rng = random.Random(room * 1000 + num_tokens + seed)
    return Request(room, tuple(rng.randrange(32000) for _ in range(num_tokens)), decode_prefix)


@dataclass
class Pool:
    """Pages of one rank; the first and the last are guards that nobody gets."""

    layout: Layout
    cells: U8
    buffer: U8
    heads: slice
    group: Sequence[Layout] = ()
    aux: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((24, 8), np.int64))
    free_pages: list[int] = field(default_factory=list)
    free_slots: list[int] = field(default_factory=list)

    def args(self) -> KVArgs:
        return KVArgs(self.layout, [self.buffer], [self.aux], group=self.group)

    def take_pages(self, count: int) -> list[int] | None:
        if count > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return taken

    def give_back(self, pages: Sequence[int], slot: int, fill: int) -> None:
        """Pages and slot are free: whoever still reads them reads `fill`, whoever still writes them is found out."""
        self.cells[np.array(pages, np.int64)] = fill
        self.free_pages += pages
        if slot >= 0:
            self.aux[slot] = 0
            self.free_slots.append(slot)

    def write(self, request: Request, pages: Sequence[int], lo: int, hi: int) -> None:
        """Put tokens [lo, hi) where a prefill forward would; pages[0] holds token 0."""
        where = self._where(pages, 0, lo, hi)
        self.cells[where] = request.kv()[lo:hi, :, :, self.heads]

    def holds(self, request: Request, pages: Sequence[int], first_token: int) -> bool:
        """Whether tokens from first_token on are right; pages[0] is the page of first_token."""
        end = len(request.tokens)
        where = self._where(pages, first_token, first_token, end)
        return bool((self.cells[where] == request.kv()[first_token:end, :, :, self.heads]).all())

    def stray_bytes(self, allowed: Sequence[int]) -> int:
        """How many bytes of pages that nobody owns, guards included, are none of the allowed values."""
        owned = np.ones(len(self.cells), bool)
        owned[[0, -1, *self.free_pages]] = False
        return int((~np.isin(self.cells[~owned], allowed)).sum())

    def guards_intact(self) -> bool:
        return bool((self.cells[[0, -1]] == FREE).all())

    def _where(self, pages: Sequence[int], first_token: int, lo: int, hi: int) -> tuple[npt.NDArray[np.int64], ...]:
        tokens = np.arange(lo, hi)
        index = tokens // PAGE_TOKENS - first_token // PAGE_TOKENS
        return np.array(pages, np.int64)[index], tokens % PAGE_TOKENS


def make_pool(order: str, tp: int, tp_size: int, pages: int = 48) -> Pool:
    """A pool of FREE bytes. The order of free pages is shuffled, and the same on all ranks of a side."""
    h0, h1 = KV_HEADS * tp // tp_size, KV_HEADS * (tp + 1) // tp_size
    layouts = [_layout(order, rank, tp_size, pages) for rank in range(tp_size)]
    layout = layouts[tp]
    buffer = np.full(max(tensor.address + tensor.nbytes for tensor in layout.tensors), FREE, np.uint8)
    if order == "page_major":
        shape = (pages, LAYERS, 2, h1 - h0, PAGE_TOKENS, HEAD_BYTES)
        cells = buffer.reshape(shape).transpose(0, 4, 1, 2, 3, 5)
    else:
        shape = (2, LAYERS, pages, PAGE_TOKENS, h1 - h0, HEAD_BYTES)
        cells = buffer.reshape(shape).transpose(2, 3, 1, 0, 4, 5)
    free = list(range(1, pages - 1))
    random.Random(order).shuffle(free)
    pool = Pool(layout, cells, buffer, slice(h0, h1), layouts, free_pages=free)
    pool.free_slots = list(range(len(pool.aux)))
    return pool


def _layout(order: str, tp: int, tp_size: int, pages: int) -> Layout:
    make = page_major if order == "page_major" else layer_major
    heads = (KV_HEADS * tp // tp_size, KV_HEADS * (tp + 1) // tp_size)
    return make(
        "shape", layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float16", pages=pages,
        page_tokens=PAGE_TOKENS, rank=Rank(tp=tp), heads=heads,
    )  # fmt: skip
