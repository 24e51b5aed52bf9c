"""Layouts of well-known memory arrangements, unbound: each tensor's address is its offset in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import msgspec

from kvferry.errors import LayoutError
from kvferry.ids import Rank
from kvferry.layout.space import Cyclic, Deal, Space
from kvferry.layout.tensor import Field, Layout, Strides, Tensor

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
"""Bytes of one element of each known cache dtype."""

_RANK, _WHOLE = Rank(), Cyclic()

Order = Literal["hnd", "nhd"]
"""Axes inside a page, outermost first: h heads, n tokens, d dim."""


def page_major(
    model: str, *, layers: int, kv_heads: int, head_dim: int, dtype: str, pages: int, page_tokens: int,
    rank: Rank = _RANK, heads: tuple[int, int] | None = None, layer_ids: Sequence[int] | None = None,
    order: Order = "hnd", deal: Deal = _WHOLE,
) -> Layout:  # fmt: skip
    """One block, [page][layer][k|v][head][token][dim]: a page of all layers is one contiguous run.

    Args:
        model: name of the model.
        layers: layers of the model.
        kv_heads: KV heads of the model.
        head_dim: dimension of a head.
        dtype: one of DTYPE_BYTES.
        pages: pages in the pool.
        page_tokens: tokens per page.
        rank: where the process stands.
        heads: the interval [h0, h1) that this rank holds; all by default.
        layer_ids: the layers that this rank holds; all by default.
        order: "hnd" or "nhd", inside a page.
        deal: which of a request's tokens the rank holds.

    Raises:
        LayoutError: the dtype is not known.
    """
    ids, heads = tuple(range(layers) if layer_ids is None else layer_ids), heads or (0, kv_heads)
    nbytes = head_dim * dtype_bytes(dtype)
    inner, item = _inner(order, heads[1] - heads[0], page_tokens, nbytes)
    strides = msgspec.structs.replace(inner, layer=2 * item, page=2 * item * len(ids))
    block = strides.page * pages
    tensors = tuple(
        Tensor("kv", ids, (heads,), (Field(name, nbytes, format=dtype),), at, block - at, strides, item, pages)
        for name, at in (("k", 0), ("v", item))
    )
    return Layout(model, dtype, kv_heads, tensors, (Space("kv", page_tokens, deal),), rank, head_dim)


def layer_major(
    model: str, *, layers: int, kv_heads: int, head_dim: int, dtype: str, pages: int, page_tokens: int,
    rank: Rank = _RANK, heads: tuple[int, int] | None = None, layer_ids: Sequence[int] | None = None,
    order: Order = "nhd", deal: Deal = _WHOLE,
) -> Layout:  # fmt: skip
    """One tensor per layer, [page][token][head][dim]; first K of all layers, then V of all layers.

    Arguments and errors are those of `page_major`.
    """
    ids, heads = range(layers) if layer_ids is None else layer_ids, heads or (0, kv_heads)
    nbytes = head_dim * dtype_bytes(dtype)
    inner, item = _inner(order, heads[1] - heads[0], page_tokens, nbytes)
    tensors = [
        Tensor(
            "kv",
            (layer,),
            (heads,),
            (Field(name, nbytes, format=dtype),),
            0,
            item * pages,
            inner,
            item,
            pages,
        )
        for name in ("k", "v")
        for layer in ids
    ]
    return Layout(model, dtype, kv_heads, stacked(tensors), (Space("kv", page_tokens, deal),), rank, head_dim)


def mla(
    model: str, *, layers: int, latent_dim: int, dtype: str, pages: int, page_tokens: int,
    rank: Rank = _RANK, layer_ids: Sequence[int] | None = None, deal: Deal = _WHOLE,
) -> Layout:  # fmt: skip
    """One tensor per layer, [page][token][latent_dim], without a head axis: every TP rank holds the same.

    `latent_dim` counts the elements of one token's latent, rotary part included; other arguments and errors
    are those of `page_major`.
    """
    nbytes = latent_dim * dtype_bytes(dtype)
    item = page_tokens * nbytes
    field, strides = Field("latent", nbytes, headed=False, format=dtype), Strides(page=item, token=nbytes)
    tensors = [
        Tensor("kv", (layer,), (), (field,), 0, item * pages, strides, item, pages)
        for layer in (range(layers) if layer_ids is None else layer_ids)
    ]
    return Layout(model, dtype, 0, stacked(tensors), (Space("kv", page_tokens, deal),), rank)


def stacked(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Give unbound tensors their offsets in one buffer: one after the other."""
    ends = accumulate(tensor.nbytes for tensor in tensors)
    return tuple(
        msgspec.structs.replace(tensor, address=end - tensor.nbytes) for tensor, end in zip(tensors, ends, strict=True)
    )


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; raises LayoutError for a dtype that is not known."""
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"unknown cache dtype {dtype!r}", hint=f"use one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _inner(order: Order, heads: int, tokens: int, nbytes: int) -> tuple[Strides, int]:
    """Strides inside one (layer, page) item, and its length."""
    item = heads * tokens * nbytes
    if order == "hnd":
        return Strides(page=item, token=nbytes, head=tokens * nbytes), item
    return Strides(page=item, token=heads * nbytes, head=nbytes), item
