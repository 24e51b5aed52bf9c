"""A layout spelled out: one row per (space, field, layer, head) that a rank holds, as arrays.

Two ranks' rows with the same key are the same data: intersecting layouts is intersecting keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.layout.tensor import Layout, Tensor

I64 = npt.NDArray[np.int64]
ID_BITS = 20
"""Layer and head ids, and the number of (space, field) kinds, are below 2**ID_BITS; `validate` sees to it."""

Kinds = Mapping[tuple[str, str], int]
"""(space, field) -> number."""


class Label(NamedTuple):
    """What a key stands for."""

    space: str
    field: str
    layer: int
    head: int


@dataclass(frozen=True)
class Elements:
    """One row per (space, field, layer, head).

    Attributes:
        key: int64[N] identity, the same on every rank for equal kinds.
        base: int64[N] address of the element of page 0, token 0.
        nbytes: int64[N] length of one element.
        page: int64[N] bytes from one page to the next.
        token: int64[N] bytes from one token (granule) to the next.
        granule: int64[N] tokens that an element covers.
        block: int64[N] number of the block of memory: tensors whose address ranges overlap share one.
    """

    key: I64
    base: I64
    nbytes: I64
    page: I64
    token: I64
    granule: I64
    block: I64


def kinds_of(layout: Layout) -> Kinds:
    """Number the layout's (space, field) pairs, in name order."""
    pairs = {(tensor.space, field.name) for tensor in layout.tensors for field in tensor.fields}
    return {pair: number for number, pair in enumerate(sorted(pairs))}


def elements(layout: Layout, kinds: Kinds) -> Elements:
    """Spell a layout out, without what `kinds` does not know."""
    alike: dict[Hashable, list[tuple[Tensor, int]]] = {}
    for tensor, block in zip(layout.tensors, _blocks(layout), strict=True):
        shape = (tensor.space, tensor.heads, tensor.fields, tensor.strides_bytes, len(tensor.layers))
        alike.setdefault(shape, []).append((tensor, block))
    parts = [_rows(group, kinds) for group in alike.values()]
    return Elements(*np.concatenate([np.empty((7, 0), np.int64), *parts], axis=1))


def label(key: int, kinds: Kinds) -> Label:
    """Turn a key back into names and ids."""
    rest, head = divmod(int(key), 1 << ID_BITS)
    kind, layer = divmod(rest, 1 << ID_BITS)
    space, field = {number: pair for pair, number in kinds.items()}[kind]
    return Label(space, field, layer, head)


def in_space(keys: I64, kinds: Kinds, space: str) -> npt.NDArray[np.bool_]:
    """bool[N]: which keys belong to a space."""
    numbers = [number for (name, _), number in kinds.items() if name == space]
    return np.isin(keys >> 2 * ID_BITS, numbers)


def layers_of(keys: I64) -> I64:
    """The distinct layer ids of keys, ascending."""
    return np.unique(keys >> ID_BITS & (1 << ID_BITS) - 1)


def _rows(alike: list[tuple[Tensor, int]], kinds: Kinds) -> I64:
    """int64[7, N] for (tensor, block) pairs that differ in address and layer ids only.

    One pass for all of them: caches with a tensor per layer have hundreds.
    """
    first, strides = alike[0][0], alike[0][0].strides_bytes
    ends = accumulate(field.nbytes for field in first.fields)
    known = [
        (kinds[first.space, field.name], end - field.nbytes, field.nbytes)
        for field, end in zip(first.fields, ends, strict=True)
        if (first.space, field.name) in kinds
    ]
    kind, offset, nbytes = np.array(known, np.int64).reshape(-1, 3).T
    layer = np.array([tensor.layers for tensor, _ in alike], np.int64)[..., None, None]
    head = np.concatenate([np.arange(*interval) for interval in first.heads or ((0, 1),)])[:, None]
    address = np.array([tensor.address for tensor, _ in alike], np.int64)[:, None, None, None]
    base = (
        address
        + np.arange(len(first.layers))[:, None, None] * strides.layer
        + np.arange(len(head))[:, None] * strides.head
        + offset
    )
    key = ((kind << ID_BITS | layer) << ID_BITS) | head
    block = np.array([block for _, block in alike], np.int64)[:, None, None, None]
    columns = (key, base, nbytes, strides.page, strides.token, first.fields[0].granule_tokens, block)
    return np.stack([np.broadcast_to(column, key.shape).ravel() for column in columns])


def _blocks(layout: Layout) -> list[int]:
    blocks = [0] * len(layout.tensors)
    block = end = 0
    for index in sorted(range(len(blocks)), key=lambda i: layout.tensors[i].address):
        tensor = layout.tensors[index]
        block += tensor.address >= end
        end = max(end, tensor.address + tensor.nbytes)
        blocks[index] = block
    return blocks
