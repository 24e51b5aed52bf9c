"""From vLLM's caches, one tensor per layer, to the layout of a rank; no vLLM in here.

Back-ends pack the bytes of a (block, head) cell as their kernels like it, so a cell is one opaque field: heads can be
chosen among, tokens can't. Block size and format are part of it, so that peers that differ in them are refused.
"""

from __future__ import annotations

import msgspec

from kvferry.errors import LayoutError
from kvferry.ids import Rank
from kvferry.layout import All, Field, Host, Layout, Space, Strides, Tensor, Window
from kvferry.layout.tensor import Device
from kvferry.presets.grid import head_interval

MAIN = "kv"


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that share block tables.

    Attributes:
        block_tokens: tokens per block.
        window: sliding window in tokens; 0 = all tokens are kept.
    """

    block_tokens: int
    window: int = 0


class CacheTensor(msgspec.Struct, frozen=True):
    """One layer's cache.

    Attributes:
        name: vLLM's name of the layer, for errors.
        layer: number of the layer in the model.
        group: index of its group.
        address: first byte.
        shape: (kernel blocks, heads of this rank, tokens of a kernel block, elements of K and V of one token).
        strides_bytes: bytes from one to the next along each axis of `shape`.
        element_bytes: bytes of one element.
        format: what packs the bytes of a cell: back-end, instruction set, dtype.
        device: index of the accelerator; -1 for host memory.
    """

    name: str
    layer: int
    group: int
    address: int
    shape: tuple[int, int, int, int]
    strides_bytes: tuple[int, int, int, int]
    element_bytes: int
    format: str
    device: int = -1


class Geometry(msgspec.Struct, frozen=True):
    """What the caches do not say.

    Attributes:
        model: name of the model, without its directory: both sides must agree.
        dtype: dtype of the cache.
        kv_heads: KV heads of the whole model.
        head_dim: dimension of a head, for error texts.
        tp_rank: this rank.
        tp_size: ranks of the engine.
        num_blocks: blocks of vLLM's pool.
        groups: the groups, in vLLM's order.
    """

    model: str
    dtype: str
    kv_heads: int
    head_dim: int
    tp_rank: int
    tp_size: int
    num_blocks: int
    groups: tuple[CacheGroup, ...]

    def at_tp(self, tp_rank: int) -> Geometry:
        """The same for another rank of the engine: vLLM's ranks are all alike."""
        return msgspec.structs.replace(self, tp_rank=tp_rank)


def space_name(group: int) -> str:
    """The space of a group: "kv" for the first, whose pages a room names first."""
    return MAIN if group == 0 else f"{MAIN}{group}"


def space_of(index: int, group: CacheGroup) -> Space:
    """A group as a space.

    The next token to be computed attends to window - 1 tokens before it: that many are kept.
    """
    coverage = Window(max(group.window - 1, 1)) if group.window else All()
    return Space(space_name(index), group.block_tokens, coverage=coverage)


def layout_of(geometry: Geometry, tensors: list[CacheTensor]) -> Layout:
    """The layout of one rank, bound to the tensors' memory.

    Raises:
        LayoutError: a cache is arranged in a way that can't be declared.
    """
    spaces = tuple(space_of(index, group) for index, group in enumerate(geometry.groups))
    found = tuple(_tensor(geometry, tensor) for tensor in tensors)
    rank = Rank(tp=geometry.tp_rank)
    return Layout(geometry.model, geometry.dtype, geometry.kv_heads, found, spaces, rank, geometry.head_dim)


def _tensor(geometry: Geometry, cache: CacheTensor) -> Tensor:
    blocks, heads, tokens, _ = cache.shape
    per_block = _kernel_blocks(geometry, cache)
    cell = _cell_bytes(cache)
    field = Field("kv", cell, granule_tokens=tokens, format=cache.format)
    block, head = cache.strides_bytes[:2]
    return Tensor(
        space_name(cache.group), (cache.layer,), (_heads(geometry, cache),), (field,), cache.address,
        (blocks - 1) * block + (heads - 1) * head + cell,
        Strides(page=per_block * block, token=block if per_block > 1 else 0, head=head),
        item_bytes=cell * heads * per_block, pages=geometry.num_blocks,
        memory=Host() if cache.device < 0 else Device(cache.device),
    )  # fmt: skip


def _kernel_blocks(geometry: Geometry, cache: CacheTensor) -> int:
    """Kernel blocks per block of the pool."""
    per_block, rest = divmod(geometry.groups[cache.group].block_tokens, cache.shape[2])
    if rest or not per_block or cache.shape[0] != geometry.num_blocks * per_block:
        raise LayoutError(
            f"vLLM layer {cache.name}: {cache.shape[0]} kernel blocks of {cache.shape[2]} tokens do not make "
            f"{geometry.num_blocks} blocks of {geometry.groups[cache.group].block_tokens} tokens",
            hint="this cache is not arranged as [blocks, heads, tokens, K and V]; please report the back-end",
        )
    return per_block


def _cell_bytes(cache: CacheTensor) -> int:
    """Bytes of one (block, head), which must lie side by side."""
    _, _, tokens, content = cache.shape
    row = content * cache.element_bytes
    if cache.strides_bytes[2:] != (row, cache.element_bytes):
        raise LayoutError(
            f"vLLM layer {cache.name}: strides {cache.strides_bytes} of {cache.shape}: tokens of a head are not "
            f"side by side",
            hint="use a head-major layout: leave VLLM_KV_CACHE_LAYOUT unset, or set it to HND",
        )
    return tokens * row


def _heads(geometry: Geometry, cache: CacheTensor) -> tuple[int, int]:
    """The interval of the model's KV heads that this rank holds; ranks above their number share one."""
    held, total = cache.shape[1], geometry.kv_heads
    if held * geometry.tp_size != total and not (held == 1 and geometry.tp_size % total == 0):
        raise LayoutError(
            f"vLLM layer {cache.name}: {held} KV heads on each of {geometry.tp_size} TP ranks, the model has {total}",
            hint="layers whose number of KV heads is not the model's are not supported",
        )
    return head_interval(total, geometry.tp_size, geometry.tp_rank)
