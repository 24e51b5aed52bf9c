"""Layouts of one rank for well-known memory arrangements, unbound: addresses are offsets in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from kvferry.ids import Rank
from kvferry.layout import Cyclic, Deal, Field, Layout, Space, Tensor
from kvferry.presets.arrange import INNER, Order, Piece, arranged, dtype_bytes

_RANK, _WHOLE = Rank(), Cyclic()


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
    pieces = _keys_and_values(heads or (0, kv_heads), head_dim, dtype)
    ids = range(layers) if layer_ids is None else layer_ids
    tensors = arranged("kv", ("page", "layer", "piece", *INNER[order]), pieces, ids, pages, page_tokens)
    return Layout(model, dtype, kv_heads, tuple(tensors), (Space("kv", page_tokens, deal),), rank, head_dim)


def layer_major(
    model: str, *, layers: int, kv_heads: int, head_dim: int, dtype: str, pages: int, page_tokens: int,
    rank: Rank = _RANK, heads: tuple[int, int] | None = None, layer_ids: Sequence[int] | None = None,
    order: Order = "nhd", deal: Deal = _WHOLE,
) -> Layout:  # fmt: skip
    """One tensor per layer, [page][token][head][dim]; first K of all layers, then V of all layers.

    Arguments and errors are those of `page_major`.
    """
    pieces = _keys_and_values(heads or (0, kv_heads), head_dim, dtype)
    ids = range(layers) if layer_ids is None else layer_ids
    tensors = arranged("kv", ("piece", "layer", "page", *INNER[order]), pieces, ids, pages, page_tokens)
    return Layout(model, dtype, kv_heads, tuple(tensors), (Space("kv", page_tokens, deal),), rank, head_dim)


def mla(
    model: str, *, layers: int, latent_dim: int, dtype: str, pages: int, page_tokens: int,
    rank: Rank = _RANK, layer_ids: Sequence[int] | None = None, deal: Deal = _WHOLE,
) -> Layout:  # fmt: skip
    """One tensor per layer, [page][token][latent_dim], without a head axis: every TP rank holds the same.

    `latent_dim` counts the elements of one token's latent, rotary part included; other arguments and errors
    are those of `page_major`.
    """
    pieces = [Piece(Field("latent", latent_dim * dtype_bytes(dtype), headed=False, format=dtype), None)]
    ids = range(layers) if layer_ids is None else layer_ids
    tensors = arranged("kv", ("piece", "layer", "page", *INNER["nhd"]), pieces, ids, pages, page_tokens)
    return Layout(model, dtype, 0, tuple(tensors), (Space("kv", page_tokens, deal),), rank)


def stacked(blocks: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Put blocks, each with addresses of its own from 0 on, one after the other into one buffer."""
    ends = list(accumulate(max(tensor.address + tensor.nbytes for tensor in block) for block in blocks))
    return tuple(
        msgspec.structs.replace(tensor, address=tensor.address + begin)
        for block, begin in zip(blocks, [0, *ends], strict=False)
        for tensor in block
    )


def _keys_and_values(heads: tuple[int, int], head_dim: int, dtype: str) -> list[Piece]:
    return [Piece(Field(name, head_dim * dtype_bytes(dtype), format=dtype), heads) for name in ("k", "v")]
