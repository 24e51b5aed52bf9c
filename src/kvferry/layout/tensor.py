"""Declared memory: fields, tensors and the layout of one rank. Nothing is guessed from shapes."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.ids import Rank
from kvferry.layout.space import Space


class Field(msgspec.Struct, frozen=True):
    """A named run of bytes of the logical row.

    Attributes:
        name: "k", "v", "latent", "scale", ...; the same on both sides.
        nbytes: bytes of one element: one token (or granule, page, request) of one head, if headed.
        per: what one element covers.
        headed: whether there is one element per KV head.
        granule_tokens: an element covers this many tokens and can't be cut (per="page": the page size).
        format: fields are copied only between equal formats (dtype, packing), as bytes.
    """

    name: str
    nbytes: int
    per: Literal["token", "page", "request"] = "token"
    headed: bool = True
    granule_tokens: int = 1
    format: str = "plain"


SHAPE = ("format", "headed", "granule_tokens", "nbytes")
"""What all ranks must say alike of a field, layer by layer; what explains a difference comes before what it makes."""


class Strides(msgspec.Struct, frozen=True):
    """Bytes from one layer, page, token (granule) or head to the next."""

    layer: int = 0
    page: int = 0
    token: int = 0
    head: int = 0


class Host(msgspec.Struct, frozen=True, tag="host"):
    """Ordinary memory of the process."""


class Device(msgspec.Struct, frozen=True, tag="device"):
    """Memory of an accelerator."""

    index: int = 0


Memory = Host | Device


class Tensor(msgspec.Struct, frozen=True):
    """One strided block of memory that holds some fields of some layers and heads of a space.

    The element of field f, layer i, page p, token t, head h (i, t, h local positions) starts at
    address + i*strides.layer + p*strides.page + t*strides.token + h*strides.head + (bytes of the fields before f).

    Attributes:
        space: name of the space that indexes it.
        layers: global layer ids, in storage order.
        heads: global KV head intervals [h0, h1), in storage order; empty if no field is headed.
        fields: the fields, in storage order, side by side in one (layer, page, token, head) cell.
        address: address of the block; 0 until it is bound to memory.
        nbytes: length of the block.
        strides_bytes: the strides.
        item_bytes: payload bytes of one (layer, page) item; what lies between items is padding, never touched.
        pages: number of pages in the block.
        memory: where the memory is.
        optional: at the decode side, what no source holds of it stays as it is (draft layers that prefill lacks).
    """

    space: str
    layers: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    fields: tuple[Field, ...]
    address: int
    nbytes: int
    strides_bytes: Strides
    item_bytes: int
    pages: int
    memory: Memory = Host()
    optional: bool = False

    @property
    def cell_bytes(self) -> int:
        """Bytes of one (layer, page, token, head): all fields, side by side."""
        return sum(field.nbytes for field in self.fields)


class Layout(msgspec.Struct, frozen=True):
    """All that one rank holds.

    Two spaces may share a pool: a tensor of each starts at the same address, with the same page stride and number of
    pages. Then a page number belongs to one of them at a time.

    Attributes:
        model: name (and revision) of the model; both sides must agree.
        dtype: name of the cache's dtype; both sides must agree.
        kv_heads: KV heads of the whole model (0 where there is no head axis).
        head_dim: dimension of one head, for error texts; 0 if it has no meaning.
        tensors: the memory.
        spaces: the index spaces that the tensors name.
        rank: where this process stands in its side's grid.
    """

    model: str
    dtype: str
    kv_heads: int
    tensors: tuple[Tensor, ...]
    spaces: tuple[Space, ...]
    rank: Rank = Rank()
    head_dim: int = 0
