"""Where a cache's axes lie in memory: names of axes from the outermost to the innermost become strides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Literal, NamedTuple

from kvferry.errors import LayoutError
from kvferry.layout import Field, Strides, Tensor

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
"""Bytes of one element of each known cache dtype."""

Order = Literal["hnd", "nhd"]
"""Axes inside a page, outermost first: h heads, n tokens, d dim."""

INNER: dict[str, tuple[str, ...]] = {"hnd": ("head", "token"), "nhd": ("token", "head")}
"""The two innermost axes, by order."""


class Piece(NamedTuple):
    """One field of a block on one rank.

    Attributes:
        field: name, bytes, what one element covers.
        heads: the interval [h0, h1) that the rank holds; None where there is no head axis.
    """

    field: Field
    heads: tuple[int, int] | None

    @property
    def width(self) -> int:
        """Heads held, 1 where there is no head axis."""
        return self.heads[1] - self.heads[0] if self.heads else 1


def arranged(
    space: str, axes: Sequence[str], pieces: Sequence[Piece], layers: Sequence[int], pages: int, page_tokens: int
) -> list[Tensor]:
    """The tensors of one block of memory, addresses counted from its start.

    Args:
        space: name of the space that indexes it.
        axes: "layer", "page", "piece", "head" and "token", outermost first. "piece" lays the pieces one after the
            other. Where "layer" is outside of "page" each layer is a tensor of its own.
        pieces: the fields; all with the same granule.
        layers: global layer ids.
        pages: pages in the pool.
        page_tokens: tokens per page.
    """
    granules = page_tokens // pieces[0].field.granule_tokens
    sizes = {"layer": len(layers), "page": pages, "token": granules}
    at = axes.index("piece")

    def inside(piece: Piece, axis: str) -> int:
        """Bytes of one step along an axis, of this piece alone."""
        counts = {**sizes, "head": piece.width, "piece": 1}
        return piece.field.nbytes * prod(counts[name] for name in axes[axes.index(axis) + 1 :])

    whole = {axis: sum(inside(piece, axis) for piece in pieces) for axis in axes[:at]}
    begins = [0, *accumulate(inside(piece, "piece") for piece in pieces)]
    total = begins[-1] * prod(sizes[axis] for axis in axes[:at] if axis in sizes)
    apart = axes.index("layer") < axes.index("page")
    tensors = []
    for piece, begin in zip(pieces, begins[:-1], strict=True):
        step = {axis: whole.get(axis) or inside(piece, axis) for axis in axes}
        strides = Strides(0 if apart else step["layer"], step["page"], step["token"], step["head"])
        heads = (piece.heads,) if piece.heads else ()
        item = piece.field.nbytes * piece.width * granules
        within = begin if "layer" in whole else 0
        for group, offset in _tensors(layers, step["layer"], begin, apart=apart):
            nbytes = step["layer"] - within if apart else total - offset
            tensors.append(Tensor(space, group, heads, (piece.field,), offset, nbytes, strides, item, pages))
    return tensors


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; raises LayoutError for a dtype that is not known."""
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"unknown cache dtype {dtype!r}", hint=f"use one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _tensors(layers: Sequence[int], step: int, begin: int, *, apart: bool) -> list[tuple[tuple[int, ...], int]]:
    """(layers, offset) of each tensor of a piece."""
    if not apart:
        return [(tuple(layers), begin)]
    return [((layer,), begin + number * step) for number, layer in enumerate(layers)]
