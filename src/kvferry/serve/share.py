"""A rank's share of one request: between the pool that the transfer engine knows and a logical cache.

A logical cache is float16[layers, 2, KV heads, tokens, head_dim] of the whole model, k and then v: what a request
has, in words that all ranks of both sides share, whatever their grids, page sizes and arrangements are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.layout import All, Layout, Space, Tensor, segments

FIELDS = ("k", "v")
UNWRITTEN = 0xFFFF
"""What a logical cache holds before anything is written: a NaN, which no key or value is."""

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Logical = npt.NDArray[np.float16]


class Difference(NamedTuple):
    """The first element that differs, and both values of its first byte that does. Ordered as fields are.

    Attributes:
        layer: global layer id.
        head: KV head.
        token: position in the request.
        field: "k" or "v".
        byte: position in the element.
        here: the value in the pool.
        there: the value in the logical cache.
    """

    layer: int
    head: int
    token: int
    field: str
    byte: int
    here: int
    there: int

    def __str__(self) -> str:
        where = f"layer {self.layer}, head {self.head}, token {self.token}, {self.field}, byte {self.byte}"
        return f"{where}: {self.here:#04x} is not {self.there:#04x}"


class _Part(NamedTuple):
    """One field of one tensor: uint8[pages, layers, heads, page_tokens, element bytes] of the pool, and its names."""

    field: int
    layers: I64
    heads: I64
    cells: U8


class Share:
    """What one rank's pool holds of one request.

    Attributes:
        tokens: int64[T], the tokens that the rank was dealt, in slot order.
        nbytes: bytes of all elements of the share.
    """

    def __init__(self, layout: Layout, pool: U8, pages: npt.NDArray[np.integer], num_tokens: int) -> None:
        """Lay views over the pool; nothing is copied.

        Args:
            layout: what the rank holds, bound to the pool.
            pool: uint8[N], the registered memory.
            pages: int[P], the request's pages in logical order.
            num_tokens: tokens of the request.

        Raises:
            InputError: a space or field that a logical cache has no place for, or too few pages.
        """
        space = layout.spaces[0]
        self.tokens, slots = _dealt(space, num_tokens)
        if len(slots) > len(pages) * space.page_tokens:
            raise InputError(f"{len(pages)} pages of {space.page_tokens} tokens, the share has {len(slots)} tokens")
        self._pool = pool
        self._page = np.asarray(pages, np.int64)[slots // space.page_tokens]
        self._row = slots % space.page_tokens
        self._parts = [part for tensor in layout.tensors for part in _parts(tensor, layout.spaces, pool)]
        self.nbytes = sum(
            len(slots) * len(part.layers) * len(part.heads) * part.cells.shape[-1] for part in self._parts
        )

    def store(self, cache: Logical) -> None:
        """Put the share of a logical cache into the pool. Raises InputError if its elements have another size."""
        for part in self._parts:
            part.cells[self._page, :, :, self._row] = self._there(part, cache)

    def merge(self, cache: Logical) -> Difference | None:
        """Put the share into a logical cache, where another rank may have written the same elements before.

        Returns:
            The first element that was written before with other bytes; it keeps those.
        """
        found: list[Difference] = []
        for part in self._parts:
            here, there = self._here(part), self._there(part, cache)
            is_free = (there == 0xFF).all(axis=-1, keepdims=True)
            found += self._differences(part, here, np.where(is_free, here, there))
            merged = np.where(is_free, here, there).transpose(1, 2, 0, 3)
            _bytes_of(cache)[self._place(part)] = merged[:, None]
        return min(found, default=None)

    def compare(self, cache: Logical) -> Difference | None:
        """Compare every byte of the share with a logical cache; returns the first element that differs."""
        found: list[Difference] = []
        for part in self._parts:
            found += self._differences(part, self._here(part), self._there(part, cache))
        return min(found, default=None)

    def stray_bytes(self, fill: int) -> int:
        """How many bytes of the pool outside of the share are not `fill`, which the whole pool held before."""
        mine = sum(int(np.count_nonzero(self._here(part) != fill)) for part in self._parts)
        return int(np.count_nonzero(self._pool != fill)) - mine

    # -- helpers: uint8[tokens, layers, heads, element bytes] of one part

    def _here(self, part: _Part) -> U8:
        copied: U8 = part.cells[self._page, :, :, self._row]
        return copied

    def _there(self, part: _Part, cache: Logical) -> U8:
        raw = _bytes_of(cache)
        if raw.shape[-1] != part.cells.shape[-1]:
            raise InputError(
                f"the layout's elements of {FIELDS[part.field]} have {part.cells.shape[-1]} bytes, the logical cache's "
                f"have {raw.shape[-1]}"
            )
        copied: U8 = raw[self._place(part)][:, 0].transpose(2, 0, 1, 3)
        return copied

    def _place(self, part: _Part) -> tuple[npt.NDArray[Any], ...]:
        return np.ix_(part.layers, np.array([part.field]), part.heads, self.tokens)

    def _differences(self, part: _Part, here: U8, there: U8) -> Iterator[Difference]:
        """The first difference of a part, if there is one."""
        wrong = np.argwhere((here != there).any(axis=-1).transpose(1, 2, 0))
        if len(wrong):
            layer, head, token = wrong[0]
            mine, theirs = here[token, layer, head], there[token, layer, head]
            byte = int(np.flatnonzero(mine != theirs)[0])
            yield Difference(
                int(part.layers[layer]), int(part.heads[head]), int(self.tokens[token]), FIELDS[part.field], byte,
                int(mine[byte]), int(theirs[byte]),
            )  # fmt: skip


def _dealt(space: Space, num_tokens: int) -> tuple[I64, I64]:
    """int64[T] tokens that a rank holds of a request, and their slots."""
    part = segments(space, 0, num_tokens, num_tokens)
    slots = np.arange(int(part.length.sum()), dtype=np.int64)
    return slots + np.repeat(part.token - part.slot, part.length), slots


def _parts(tensor: Tensor, spaces: tuple[Space, ...], pool: U8) -> Iterator[_Part]:
    heads = np.concatenate([np.arange(h0, h1, dtype=np.int64) for h0, h1 in tensor.heads or ((0, 0),)])
    strides, offset = tensor.strides_bytes, tensor.address - pool.ctypes.data
    for field in tensor.fields:
        whole = len(spaces) == 1 and isinstance(spaces[0].coverage, All)
        if not whole or field.name not in FIELDS or field.per != "token" or field.granule_tokens != 1:
            raise InputError(
                f"space {tensor.space!r}, field {field.name!r} per {field.per}: a logical cache has k and v of every "
                f"token, in one space"
            )
        shape = (tensor.pages, len(tensor.layers), len(heads), spaces[0].page_tokens, field.nbytes)
        steps = (strides.page, strides.layer, strides.head, strides.token, 1)
        cells: U8 = np.ndarray(shape, np.uint8, pool.data, offset, steps)  # numpy checks that it lies in the pool
        yield _Part(FIELDS.index(field.name), np.array(tensor.layers, np.int64), heads, cells)
        offset += field.nbytes


def _bytes_of(cache: Logical) -> U8:
    """uint8[layers, 2, KV heads, tokens, element bytes] of the same memory."""
    return cache.view(np.uint8)
