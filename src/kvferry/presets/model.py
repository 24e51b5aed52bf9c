"""What a model keeps of a request, whatever engine serves it: spaces, layers, fields, heads."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.layout import All, Coverage


class Item(msgspec.Struct, frozen=True):
    """One field.

    Attributes:
        name: the field's name.
        values: elements of the cache's dtype in one token (page, request) of one head.
        heads: its heads in the whole model; 0: no head axis, every TP rank holds all of it.
        dtype: its own dtype; "" is the cache's.
    """

    name: str
    values: int
    heads: int = 0
    dtype: str = ""


class Block(msgspec.Struct, frozen=True):
    """What some layers keep in one space.

    Attributes:
        space: the space's name.
        layers: global layer ids.
        items: the fields, in storage order.
        coverage: which part of a request is kept.
        per: what one element of the fields covers.
        optional: whether decode may hold it although prefill does not (draft layers).
    """

    space: str
    layers: tuple[int, ...]
    items: tuple[Item, ...]
    coverage: Coverage = All()
    per: Literal["token", "page", "request"] = "token"
    optional: bool = False


class ModelShape(msgspec.Struct, frozen=True):
    """The KV geometry of a model.

    Attributes:
        name: the model, as both sides name it.
        blocks: what it keeps.
        dtype: the dtype that its cache usually has.
        head_dim: dimension of one head; 0 where it has no meaning.
        source: where the numbers come from.
    """

    name: str
    blocks: tuple[Block, ...]
    dtype: str = "bfloat16"
    head_dim: int = 0
    source: str = ""

    @property
    def layers(self) -> int:
        """Layers, draft layers included."""
        return 1 + max(layer for block in self.blocks for layer in block.layers)

    @property
    def kv_heads(self) -> int:
        """The most KV heads of a field that is kept per token."""
        return max((item.heads for block in self.blocks if block.per == "token" for item in block.items), default=0)


def attention(name: str, *, layers: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16") -> ModelShape:
    """A model whose layers all keep K and V of every token (MHA, GQA)."""
    items = tuple(Item(field, head_dim, kv_heads) for field in ("k", "v"))
    return ModelShape(name, (Block("kv", tuple(range(layers)), items),), dtype, head_dim)
