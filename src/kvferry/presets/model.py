"""What a model keeps of a request, whatever engine serves it: spaces, layers, fields, heads."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.layout import All, Coverage, Window


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
        optional: draft layers: a grid with draft=1 holds them, on the last pipeline stage; prefill may lack them.
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
        """Layers that pipeline stages share out: all but the draft layers."""
        return 1 + max(layer for block in self.blocks if not block.optional for layer in block.layers)

    @property
    def kv_heads(self) -> int:
        """The most heads of what is kept of tokens; recurrent state has heads of its own."""
        kept = [block for block in self.blocks if isinstance(block.coverage, All | Window)]
        return max((item.heads for block in kept for item in block.items), default=0)


def attention(name: str, *, layers: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16") -> ModelShape:
    """A model whose layers all keep K and V of every token (MHA, GQA)."""
    items = tuple(Item(field, head_dim, kv_heads) for field in ("k", "v"))
    return ModelShape(name, (Block("kv", tuple(range(layers)), items),), dtype, head_dim)
