"""Do two layouts fit together, and do some of them together hold all that another one needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from kvferry.layout.elements import I64, elements, in_space, kinds_of, label, layers_of
from kvferry.layout.shared_out import tokens_missing
from kvferry.layout.space import Rows
from kvferry.layout.tensor import SHAPE, Field, Layout


class Fit(msgspec.Struct, frozen=True):
    """What `supports` found; true if the layouts fit.

    Attributes:
        reason: why not, with both values and what to do; "" if they fit.
        granule_tokens: a prefix that decode keeps must be a multiple of it: the tokens that an opaque field covers.
    """

    reason: str = ""
    granule_tokens: int = 1

    def __bool__(self) -> bool:
        return not self.reason


def supports(src: Layout, dst: Layout) -> Fit:
    """Whether what src holds of dst can be copied there; which layers it holds is the subject of `covers`."""
    if reason := next(_differences(src, dst), ""):
        return Fit(reason)
    fields = _fields(dst)
    return Fit(granule_tokens=math.lcm(*(fields[key].granule_tokens for key in _fields(src).keys() & fields.keys())))


def covers(sources: Sequence[Layout], dst: Layout) -> str:
    """Whether the sources together hold every element and token that dst declares.

    Returns:
        "" or the first thing that no source holds.
    """
    kinds = kinds_of(dst)
    wanted = elements(dst, kinds).key
    optional = msgspec.structs.replace(dst, tensors=tuple(tensor for tensor in dst.tensors if tensor.optional))
    held = [np.isin(wanted, elements(source, kinds).key) for source in sources]
    nobodys = ~np.any(held, axis=0) if held else np.ones(len(wanted), bool)
    left = nobodys & np.isin(wanted, elements(optional, kinds).key)
    missing = wanted[nobodys & ~left]
    if len(missing):
        first = label(missing[0], kinds)
        layers = _ranges(layers_of(missing[in_space(missing, kinds, first.space)]))
        return (
            f"decode holds what no prefill rank holds: space {first.space!r}, layer {first.layer}, field "
            f"{first.field!r}, head {first.head}, and {len(missing) - 1} more (layers {layers}); "
            f"load the same layers on both sides, or declare these optional in decode's layout"
        )
    for space in dst.spaces:
        mine = in_space(wanted, kinds, space.name) & ~left
        if reason := tokens_missing(sources, [mask[mine] for mask in held], space):
            return reason
    return ""


def _differences(src: Layout, dst: Layout) -> Iterator[str]:
    for name in ("model", "dtype", "kv_heads", "head_dim"):
        if (a := getattr(src, name)) != (b := getattr(dst, name)):
            yield f"{name}: prefill has {a!r}, decode has {b!r}; use the same model and dtype on both"
    src_spaces, dst_spaces = ({space.name: space for space in side.spaces} for side in (src, dst))
    common = [name for name in src_spaces if name in dst_spaces]
    if not common:
        yield (
            f"spaces: prefill has {sorted(src_spaces)}, decode has {sorted(dst_spaces)}, none in common; "
            f"use the same space names on both sides"
        )
    for name in common:
        if (a := src_spaces[name].coverage) != (b := dst_spaces[name].coverage):
            yield f"coverage of space {name!r}: prefill has {a}, decode has {b}; declare one"
        p, q = src_spaces[name].page_tokens, dst_spaces[name].page_tokens
        if isinstance(a, Rows) and p != q:
            yield f"rows of space {name!r}: prefill's are of {p} tokens, decode's of {q}; use the same page size"
    dst_fields = _fields(dst)
    for (space, field, layer), shape in _fields(src).items():
        other = dst_fields.get((space, field, layer), shape)
        for what in SHAPE:
            if (a := getattr(shape, what)) != (b := getattr(other, what)):
                yield (
                    f"{what} of field {field!r} in space {space!r}, layer {layer}: prefill has {a!r}, decode has "
                    f"{b!r}; fields are copied as they are and can't be cut: use the same dtype, format and granule"
                )


def _fields(layout: Layout) -> dict[tuple[str, str, int], Field]:
    """By space, field and layer: draft layers may be wider than the others, or have another format."""
    return {
        (tensor.space, field.name, layer): field
        for tensor in layout.tensors
        for field in tensor.fields
        for layer in tensor.layers
    }


def _ranges(ids: I64) -> str:
    parts = np.split(ids, np.flatnonzero(np.diff(ids) > 1) + 1)
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)
