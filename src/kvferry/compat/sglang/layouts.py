"""SGLang's KVArgs as a layout, by one table from its kinds of state to spaces and fields. Imports nothing of SGLang.

Facts about the pools: K and V of all layers are separate entries, K first, `[slots, heads, dim]` with slot = page *
page size + token ("nhd"; SGLang refuses other orders for a transfer); MLA has one entry per layer; draft layers come
last. State is an entry per (tensor, layer), `[slots, ...]`. (SGLang 0.5.23: disaggregation/utils.py
`setup_state_kv_args`, mem_cache/memory_pool.py `get_contiguous_buf_infos`.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

from kvferry.compat.sglang.geometry import Geometry
from kvferry.errors import LayoutError
from kvferry.layout import Device, Field, Host, Layout, Memory, Rows, Slot, Space, Strides, Tensor
from kvferry.presets.grid import head_interval

MAIN = "kv"
KEY_VALUE, LATENT = ("k", "v"), ("latent",)
"""Fields of a layer, in the order of SGLang's regions."""

MOST_UNITS = 128
"""State is cut into at most so many parts per group: one for each rank of the widest tensor parallelism."""


class Lists(Enum):
    """What the page list of a kind of state names."""

    SUFFIX = "pages from the decode prefix on"
    ALL = "all pages of the request"
    SLOT = "one slot"
    ROWS = "rows"


class Kind(NamedTuple):
    """A kind of state.

    Attributes:
        space: name of its space.
        lists: what its page list names.
        paged: whether an item is a page of tokens, so that heads inside of it can be cut.
    """

    space: str
    lists: Lists
    paged: bool = False


STATES: dict[str, Kind] = {
    "mamba": Kind("mamba", Lists.SLOT),
    "swa": Kind("swa", Lists.SUFFIX, paged=True),
    "dsa": Kind("dsa", Lists.SUFFIX),
    "minimax_index_k": Kind("minimax_index_k", Lists.SUFFIX),
    "minimax_dense_kv": Kind("minimax_dense_kv", Lists.ALL, paged=True),
    "qsa_compressed": Kind("qsa_compressed", Lists.ALL),
    "qsa_pending": Kind("qsa_pending", Lists.ROWS),
    "swa_ring": Kind("swa_ring", Lists.ROWS),
    "c128_state": Kind("c128_state", Lists.ROWS),
    "request_row": Kind("request_row", Lists.ROWS),
    "block_scale": Kind("block_scale", Lists.ALL),
    "block_scale_swa": Kind("block_scale_swa", Lists.SUFFIX),
}
"""Kinds of state by SGLang's names (`StateType`)."""

_REGIONS = "kv_data_ptrs", "kv_data_lens", "kv_item_lens"
_STATE_REGIONS = "state_data_ptrs", "state_data_lens", "state_item_lens"

REFUSED = {"dsa_tail": "its indices are parts of a ring row and mean other bytes on the other side"}
"""Kinds that can't be carried, and why."""


class _Entry(NamedTuple):
    """One registered region: `[slots, item]`."""

    address: int
    nbytes: int
    item_bytes: int
    layer: int


def layout_of(args: Any, geometry: Geometry) -> Layout:
    """The bound layout of one rank.

    Args:
        args: SGLang's KVArgs.
        geometry: what they do not say.

    Raises:
        LayoutError: a kind of state that can't be carried, or sizes that contradict each other; it is named.
    """
    spaces = [Space(MAIN, args.page_size)]
    tensors = list(_main(args, geometry))
    for number, state in enumerate(args.state_types):
        name = str(getattr(state, "value", state))
        if name not in STATES:
            why = REFUSED.get(name, "kvferry does not know it")
            hint = "serve this model with a built-in transfer backend, or without disaggregation"
            raise LayoutError(f"SGLang state {name!r}: {why}", hint=hint)
        kind = STATES[name]
        spaces.append(_space(kind, args.page_size))
        tensors += _state(args, geometry, number, kind)
    heads = max(geometry.kv_heads, geometry.swa_kv_heads)
    return Layout(geometry.model, geometry.dtype, heads, tuple(tensors), tuple(spaces), geometry.rank)


def host_args(args: Any) -> Any:
    """KVArgs of a decode rank's second pool, in host memory: the same regions, elsewhere; None if it has none.

    Args:
        args: SGLang's KVArgs of the rank.
    """
    if getattr(args, "host_kv_data_ptrs", None) is None:
        return None
    found = copy.copy(args)
    for name in (*_REGIONS, *(_STATE_REGIONS if args.state_types else ())):
        setattr(found, name, getattr(args, f"host_{name}"))
    return found


def _space(kind: Kind, page_tokens: int) -> Space:
    if kind.lists is Lists.SLOT:
        return Space(kind.space, 1, coverage=Slot())
    return Space(kind.space, page_tokens if kind.paged else 1, coverage=Rows())


def _main(args: Any, geometry: Geometry) -> Sequence[Tensor]:
    entries = _entries(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, args.kv_layer_ids)
    drafts = args.num_draft_entries
    own = len(entries) - drafts
    names = KEY_VALUE if geometry.kv_heads else LATENT
    numbered = [
        *_numbered(entries[:own], names, geometry.first_layer),
        *_numbered(entries[own:], names, geometry.layers),
    ]
    tensors = []
    for number, (entry, name) in enumerate(numbered):
        heads = head_interval(geometry.kv_heads, geometry.sizes.tp, geometry.rank.tp) if geometry.kv_heads else None
        optional = number >= own
        tensors.append(_paged(MAIN, entry, name, heads, args, geometry, optional=optional))
    return tensors


def _numbered(entries: Sequence[_Entry], names: Sequence[str], first_layer: int) -> list[tuple[_Entry, str]]:
    """Name the entries, K of all layers before V of all layers, and number the layers where SGLang does not."""
    each, rest = divmod(len(entries), len(names))
    if rest:
        what = f"{len(entries)} KV regions are no whole number of layers with {len(names)} each"
        raise LayoutError(
            f"SGLang KV pool: {what}", hint="is this an MLA model that is taken for another, or the reverse?"
        )
    return [
        (entry if entry.layer >= 0 else entry._replace(layer=first_layer + number % each), names[number // each])
        for number, entry in enumerate(entries)
    ]


def _entries(ptrs: Any, lens: Any, items: Any, layer_ids: Any) -> list[_Entry]:
    ids = list(layer_ids) if len(layer_ids) else [-1] * len(ptrs)
    return [_Entry(int(p), int(n), int(i), int(layer)) for p, n, i, layer in zip(ptrs, lens, items, ids, strict=True)]


def _paged(
    space: str, entry: _Entry, name: str, heads: tuple[int, int] | None, args: Any, geometry: Geometry, *,
    optional: bool = False,
) -> Tensor:  # fmt: skip
    """An entry whose item is a page, `[tokens][heads][dim]`."""
    count = heads[1] - heads[0] if heads else 1
    nbytes, rest = divmod(entry.item_bytes, args.page_size * count)
    if rest or not nbytes:
        what = f"a page of {entry.item_bytes} bytes is not {args.page_size} tokens of {count} heads"
        raise LayoutError(f"SGLang space {space!r}, layer {entry.layer}, field {name!r}: {what}")
    field = Field(name, nbytes, headed=heads is not None, format=geometry.dtype)
    strides = Strides(0, entry.item_bytes, nbytes * count, nbytes)
    return Tensor(
        space, (entry.layer,), (heads,) if heads else (), (field,), entry.address, entry.nbytes, strides,
        entry.item_bytes, entry.nbytes // entry.item_bytes, _memory(geometry), optional,
    )  # fmt: skip


def _state(args: Any, geometry: Geometry, number: int, kind: Kind) -> list[Tensor]:
    """The tensors of one kind of state."""
    ptrs, lens, items = (each[number] for each in (args.state_data_ptrs, args.state_data_lens, args.state_item_lens))
    entries = _entries(ptrs, lens, items, args.state_layer_ids[number])
    if geometry.sizes.pp > 1 and entries and entries[0].layer < 0:
        what = f"SGLang does not say which layers its regions are of, and pp={geometry.sizes.pp} stages share them out"
        raise LayoutError(f"SGLang space {kind.space!r}: {what}", hint="serve this model with --pp-size 1")
    dims = list(args.state_dim_per_tensor[number])
    if dims:
        outers = list(args.state_slice_outer_counts[number]) or [1] * len(entries)
        groups = list(args.state_conv_shard_groups[number]) or [None] * len(entries)
        repeats = _repeats([entry.layer for entry in entries])
        return [
            tensor
            for entry, dim, outer, group, which in zip(entries, dims, outers, groups, repeats, strict=True)
            for tensor in _sliced(kind.space, entry, (dim, outer, group), which, geometry)
        ]
    kv_heads = geometry.swa_kv_heads if kind.paged else 0
    if kind.paged and kv_heads and len(entries) % 2 == 0:
        heads = head_interval(kv_heads, geometry.sizes.tp, geometry.rank.tp)
        return [_paged(kind.space, e, name, heads, args, geometry) for e, name in _numbered(entries, KEY_VALUE, 0)]
    return [_whole(kind, entry, position, args, geometry) for position, entry in enumerate(entries)]


def _repeats(layers: Sequence[int]) -> list[int]:
    """How often each layer id was there before: entries are tensor by tensor, each for all layers."""
    seen: dict[int, int] = {}
    found = []
    for layer in layers:
        found.append(seen.get(layer, 0))
        seen[layer] = found[-1] + 1
    return found


def _whole(kind: Kind, entry: _Entry, position: int, args: Any, geometry: Geometry) -> Tensor:
    """An entry that can't be cut: every rank has the same, or both sides have equal ranks."""
    tokens = args.page_size if kind.paged else 1
    layer = entry.layer if entry.layer >= 0 else position
    per: Literal["page", "request"] = "request" if kind.lists is Lists.SLOT else "page"
    field = Field("item", entry.item_bytes, per, headed=False, granule_tokens=tokens, format="opaque")
    return Tensor(
        kind.space, (layer,), (), (field,), entry.address, entry.nbytes, Strides(page=entry.item_bytes),
        entry.item_bytes, entry.nbytes // entry.item_bytes, _memory(geometry),
    )  # fmt: skip


def _sliced(
    space: str, entry: _Entry, shape: tuple[int, int, Sequence[int] | None], which: int, geometry: Geometry
) -> list[Tensor]:
    """An entry `[slots][outer][dim][...]` whose dim is sharded over TP ranks, maybe in groups sharded on their own.

    A dim of 0 marks an item that every rank holds alike.
    """
    dim, outer, groups = shape
    if not dim:
        return [_tensor(space, entry, f"t{which}", None, (0, entry.item_bytes, entry.item_bytes), geometry)]
    size, rank = geometry.state_tp_size, geometry.state_tp_rank
    row_bytes, rest = divmod(entry.item_bytes, outer)
    cell_bytes, rest2 = divmod(row_bytes, dim)
    if rest or rest2:
        what = f"a slot of {entry.item_bytes} bytes is not {outer} rows of {dim}"
        raise LayoutError(f"SGLang space {space!r}, layer {entry.layer}: {what}")
    tensors, at = [], 0
    for number, whole in enumerate(groups or [dim * size]):
        units = math.gcd(whole, MOST_UNITS)
        held, uneven = divmod(units, size)
        if uneven and size <= units:
            what = f"group {number} of {whole} channels in {units} parts over {size} TP ranks"
            raise LayoutError(
                f"SGLang space {space!r}, layer {entry.layer}: {what}", hint="use a TP size that divides it"
            )
        first, count = (rank * held, held) if held else (rank * units // size, 1)
        unit_bytes = whole // units * cell_bytes
        for row in range(outer):
            place = row * row_bytes + at, unit_bytes, unit_bytes * count
            name = f"t{which}.{number}.{row}"
            tensors.append(_tensor(space, entry, name, (first, first + count), place, geometry))
        at += unit_bytes * count
    return tensors


def _tensor(
    space: str, entry: _Entry, name: str, heads: tuple[int, int] | None, place: tuple[int, int, int],
    geometry: Geometry,
) -> Tensor:  # fmt: skip
    """Part of a slot: (offset in it, bytes of one element, bytes of all)."""
    offset, nbytes, payload = place
    field = Field(name, nbytes, "request", headed=heads is not None, format="state")
    return Tensor(
        space, (entry.layer,), (heads,) if heads else (), (field,), entry.address + offset, entry.nbytes - offset,
        Strides(page=entry.item_bytes, head=nbytes), payload, entry.nbytes // entry.item_bytes, _memory(geometry),
    )  # fmt: skip


def _memory(geometry: Geometry) -> Memory:
    return Host() if geometry.device < 0 else Device(geometry.device)
