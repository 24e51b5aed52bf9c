"""The elements of a request in one rank's memory, as strided arrays over its layout: written, compared, put back.

Every word of a request is told by its number among all words of the model: field, layer, head, token and the word's
place in the element. `pattern` makes bytes of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.bench.geometry import I32, U8
from kvferry.bench.pattern import STEP, U64, word_at
from kvferry.bench.positions import I64, Held
from kvferry.errors import InputError
from kvferry.layout import Field, Layout, Tensor

WORD_BYTES = 8
GUARD = np.uint64(0xA5A5_5A5A_C3C3_3C3C)
"""What lies where nothing was sent to."""
_SPAN_WORDS = 1 << 44
"""Numbers between the first words of two fields of two layers."""
_CHUNK_TOKENS = 2048
"""Looked at together: some MB."""


class Listed(NamedTuple):
    """What of a request a rank's memory holds in one space, and where.

    Attributes:
        held: tokens and their slots.
        pages: int32[P] the page list.
        first_page: which page of the rank's slots the list begins with.
    """

    held: Held
    pages: I32
    first_page: int


@dataclass(frozen=True)
class Places:
    """Where the elements of one field of one layer lie.

    Attributes:
        label: field and layer in words.
        view: uint64[pages, granules, heads, words] over the rank's memory.
        heads: int64[H] the heads' global numbers.
        number: of the field and layer, in the order of the model.
        page: int64[N] the page of each element.
        offset: int64[N] its granule in the page.
        position: int64[N] what it covers, counted over all requests in flight.
        positions: how many there are in all of these.
    """

    label: str
    view: U64
    heads: I64
    number: int
    page: I64
    offset: I64
    position: I64
    positions: int

    def write(self, round_number: int) -> None:
        """Write the round's bytes."""
        for part, values in self._chunks(round_number):
            self.view[self.page[part], self.offset[part]] = values

    def take(self, round_number: int) -> str:
        """Compare with the round's bytes, and put the guard's in their place; what is wrong, in words, or ""."""
        for part, values in self._chunks(round_number):
            found = self.view[self.page[part], self.offset[part]]
            if not np.array_equal(found, values):
                return self._first(part.start, found, values)
            self.view[self.page[part], self.offset[part]] = GUARD
        return ""

    def _chunks(self, round_number: int) -> Iterator[tuple[slice, U64]]:
        """uint64[n, heads, words] of some elements after the others."""
        words = np.arange(self.view.shape[-1], dtype=np.int64)
        for begin in range(0, len(self.position), _CHUNK_TOKENS):
            part = slice(begin, begin + _CHUNK_TOKENS)
            rows = self.heads[None, :] * self.positions + self.position[part, None]
            table = (rows[:, :, None] * len(words) + words).view(np.uint64) * np.uint64(STEP)
            yield part, np.add(table, word_at(round_number, self.number * _SPAN_WORDS), out=table)

    def _first(self, begin: int, found: U64, values: U64) -> str:
        element, head, word = (int(index[0]) for index in np.nonzero(found != values))
        where = f"{self.label}, head {int(self.heads[head])}, token {int(self.position[begin + element])}"
        words = (int(array[element, head, word]) for array in (found, values))
        return "{}: byte {} differs: found {:#018x}, {:#018x} was sent".format(where, WORD_BYTES * word, *words)


def field_numbers(layouts: Sequence[Layout]) -> dict[tuple[str, str, int], int]:
    """A number for each (space, field, layer) of some ranks; both sides number what prefill holds."""
    keys = {
        (tensor.space, field.name, layer)
        for layout in layouts
        for tensor in layout.tensors
        for field in tensor.fields
        for layer in tensor.layers
    }
    return {key: number for number, key in enumerate(sorted(keys))}


def places(
    layout: Layout, pool: U8, lists: Mapping[str, Listed], numbers: Mapping[tuple[str, str, int], int],
    room: int, rooms: int, tokens: int,
) -> Iterator[Places]:  # fmt: skip
    """All places of one request in one rank's memory.

    Args:
        layout: unbound: addresses are offsets in the pool.
        pool: the rank's memory.
        lists: by space.
        numbers: of `field_numbers`; what has none is left out.
        room: which of the requests in flight.
        rooms: how many there are.
        tokens: tokens of each.

    Raises:
        InputError: an element is not a whole number of words.
    """
    spaces = {space.name: space for space in layout.spaces}
    for tensor in layout.tensors:
        found, pages, first_page = lists[tensor.space]
        size = spaces[tensor.space].page_tokens
        within = 0
        for field in tensor.fields:
            first = np.unique(found.slot // field.granule_tokens, return_index=True)[1]
            slot, position = found.slot[first], found.position[first] // field.granule_tokens
            page = pages[slot // size - first_page].astype(np.int64)
            for index, layer in enumerate(tensor.layers):
                number = numbers.get((tensor.space, field.name, layer))
                if number is not None and len(slot):
                    view = _view(tensor, field, index, within, size, pool)
                    yield Places(
                        f"{field.name} of layer {layer}", view, _heads(tensor), number, page,
                        slot % size // field.granule_tokens, position + room * tokens, rooms * tokens,
                    )  # fmt: skip
            within += field.nbytes


def _heads(tensor: Tensor) -> I64:
    heads = [head for h0, h1 in tensor.heads for head in range(h0, h1)]
    return np.array(heads or [0], np.int64)


def _view(tensor: Tensor, field: Field, layer: int, within: int, page_tokens: int, pool: U8) -> U64:
    strides = tensor.strides_bytes
    start = tensor.address + layer * strides.layer + within
    steps = (strides.page, strides.token, strides.head, WORD_BYTES)
    heads = sum(h1 - h0 for h0, h1 in tensor.heads)
    if any(size % WORD_BYTES for size in (start, field.nbytes, *steps)):
        raise InputError(f"elements of {field.nbytes} bytes in {field.name} are no whole words of {WORD_BYTES} bytes")
    shape = (tensor.pages, max(1, page_tokens // field.granule_tokens), max(1, heads), field.nbytes // WORD_BYTES)
    if not heads:
        steps = (*steps[:2], 0, WORD_BYTES)
    view: npt.NDArray[np.uint64] = np.ndarray(shape, np.uint64, pool.data, start, steps)
    return view
