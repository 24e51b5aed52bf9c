"""Is a layout sound: numbers within bounds, every cell inside its block, no two cells on the same bytes.

Layouts also arrive from the network: nothing is allocated in proportion to a number before it is checked.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import NoReturn

import msgspec
import numpy as np

from kvferry.errors import LayoutError
from kvferry.layout.deal import canonical
from kvferry.layout.elements import ID_BITS, elements, kinds_of, label
from kvferry.layout.one_pool import may_overlay
from kvferry.layout.space import All, Cyclic, Ranges, Rows, Slot, Space, Window
from kvferry.layout.tensor import SHAPE, Field, Layout, Tensor

MAX_ELEMENTS = 1 << 18
"""(space, field, layer, head) combinations of one rank."""
_MAX_TENSORS, _MAX_SPACES, _MAX_FIELDS, _MAX_NAME = 4096, 64, 64, 256
_MAX_ID = (1 << ID_BITS) - 1
_MAX_BYTES = (1 << 62) - 1
_MAX_PARTS = 4096  # of a request; each is looked at for each request
LOWEST_ADDRESS = 4096  # no system maps page 0: what lies below is an offset, not an address

_Bound = tuple[str, int, int, int]
"""Name, value, lowest and highest allowed value."""


def validate(layout: Layout, side: str, *, bound: bool = False) -> None:
    """Check that a layout does not contradict itself.

    Args:
        layout: the layout, from here or from a peer.
        side: "prefill" or "decode", for the error text.
        bound: whether every tensor must also have a real address.

    Raises:
        LayoutError: naming the side, the tensor, the field and the values that contradict each other.
    """
    plain(layout, f"{side} layout")
    _check_bounds(f"{side} layout", _layout_bounds(layout))
    spaces = {space.name: space for space in layout.spaces}
    if len(spaces) < len(layout.spaces):
        names = [space.name for space in layout.spaces]
        _fail(f"{side} layout", f"space names repeat: {names}", "declare each space once")
    for space in layout.spaces:
        _check_space(f"{side} space {space.name!r}", space)
    left = MAX_ELEMENTS
    for number, tensor in enumerate(layout.tensors):
        where = f"{side} tensor {number} (space {tensor.space!r})"
        if tensor.space not in spaces:
            _fail(
                where,
                f"unknown space {tensor.space!r}, declared are {sorted(spaces)}",
                "declare it in spaces",
            )
        left -= _check_tensor(where, tensor, spaces[tensor.space], layout.kv_heads)
        if left < 0:
            _fail(
                where,
                f"more than {MAX_ELEMENTS} elements (layer, head, field) so far",
                "check heads and layers",
            )
        if bound and tensor.address < LOWEST_ADDRESS:
            _fail(where, f"address {tensor.address:#x} is not bound to memory", "call bind(layout, buffers)")
    _check_alike(side, layout)
    _check_distinct(side, layout)


def plain(layout: Layout, where: str) -> Layout:
    """The same layout, of the types that its declaration says: numbers of numpy's or lists would not travel.

    Raises:
        LayoutError: it has values that a peer could not read, or is none.
    """
    if not isinstance(layout, Layout):
        _fail(where, f"it is {type(layout).__name__}, not Layout", "see kvferry.presets")
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout)
    except (TypeError, ValueError, OverflowError) as error:
        _fail(where, str(error), "plain int, str and tuple are what it is declared with: int(x) for numpy's numbers")


def digest(layout: Layout) -> str:
    """Hash everything but the addresses.

    Returns:
        32 hexadecimal digits; equal for layouts that hold the same data in the same arrangement.
    """
    tensors = tuple(msgspec.structs.replace(tensor, address=0) for tensor in layout.tensors)
    data = msgspec.msgpack.encode(msgspec.structs.replace(layout, tensors=tensors))
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _fail(where: str, what: str, hint: str) -> NoReturn:
    raise LayoutError(f"{where}: {what}", hint=hint)


def _check_bounds(where: str, bounds: Iterator[_Bound]) -> None:
    for name, value, low, high in bounds:
        if not low <= value <= high:
            _fail(where, f"{name} is {value}, must be in [{low}, {high}]", "correct the declaration")


def _layout_bounds(layout: Layout) -> Iterator[_Bound]:
    yield "number of tensors", len(layout.tensors), 0, _MAX_TENSORS
    yield "number of spaces", len(layout.spaces), 0, _MAX_SPACES
    yield "kv_heads", layout.kv_heads, 0, _MAX_ID
    yield "head_dim", layout.head_dim, 0, _MAX_ID
    yield "length of model name", len(layout.model), 0, _MAX_NAME
    yield "length of dtype name", len(layout.dtype), 0, _MAX_NAME
    yield from ((f"rank {axis}", getattr(layout.rank, axis), 0, _MAX_ID) for axis in ("dp", "pp", "cp", "tp"))


def _check_space(where: str, space: Space) -> None:
    _check_bounds(where, _space_bounds(space))
    deal = space.deal
    if isinstance(deal, Ranges) and len(set(deal.owned)) < len(deal.owned):
        _fail(where, f"owned parts repeat: {deal.owned}", "name each part once")
    whole = isinstance(space.coverage, (Slot, Rows))
    if (whole and canonical(deal) != Cyclic()) or (isinstance(space.coverage, Slot) and space.page_tokens != 1):
        what = f"coverage {type(space.coverage).__name__} with page_tokens {space.page_tokens} and deal {deal}"
        _fail(where, what, "slots have pages of 1, and neither they nor rows are dealt out: use Cyclic()")


def _space_bounds(space: Space) -> Iterator[_Bound]:
    yield "length of name", len(space.name), 1, _MAX_NAME
    yield "page_tokens", space.page_tokens, 1, _MAX_ID
    if isinstance(space.coverage, Window):
        yield "window tokens", space.coverage.tokens, 1, 1 << 40
    deal = space.deal
    yield "deal unit_tokens", deal.unit_tokens, 1, _MAX_ID
    if isinstance(deal, Ranges):
        yield "deal parts", deal.parts, 1, _MAX_PARTS
        yield "number of owned parts", len(deal.owned), 1, deal.parts
        yield from (("owned part", part, 0, deal.parts - 1) for part in deal.owned)
    else:
        yield "deal ranks", deal.ranks, 1, 1 << 16
        yield "deal rank", deal.rank, 0, deal.ranks - 1


def _check_tensor(where: str, tensor: Tensor, space: Space, kv_heads: int) -> int:
    """Check one tensor; returns its number of elements."""
    _check_bounds(where, _tensor_bounds(tensor))
    _check_fields(where, tensor, space)
    # KV heads bound the spaces of tokens; recurrent state has a head axis of its own
    heads = kv_heads if isinstance(space.coverage, (All, Window)) else _MAX_ID
    _check_bounds(where, _head_bounds(tensor, heads))
    head_count = sum(h1 - h0 for h0, h1 in tensor.heads)
    if tensor.fields[0].headed != bool(head_count):
        what = f"field {tensor.fields[0].name!r} has headed={tensor.fields[0].headed}, heads are {tensor.heads}"
        _fail(where, what, "give heads exactly where the fields are headed")
    _check_cells(where, tensor, space.page_tokens // tensor.fields[0].granule_tokens, head_count or 1)
    return len(tensor.layers) * (head_count or 1) * len(tensor.fields)


def _tensor_bounds(tensor: Tensor) -> Iterator[_Bound]:
    strides = tensor.strides_bytes
    yield "number of layers", len(tensor.layers), 1, 1 << 16
    yield from (("layer id", layer, 0, _MAX_ID) for layer in tensor.layers)
    yield "number of fields", len(tensor.fields), 1, _MAX_FIELDS
    yield "number of head intervals", len(tensor.heads), 0, 1 << 16
    yield "pages", tensor.pages, 1, 1 << 40
    yield "nbytes", tensor.nbytes, 1, _MAX_BYTES
    yield "address", tensor.address, 0, _MAX_BYTES
    for name in ("layer", "page", "token", "head"):
        yield f"{name} stride", getattr(strides, name), 0, _MAX_BYTES
    for field in tensor.fields:
        yield f"length of the name of field {field.name[:_MAX_NAME]!r}", len(field.name), 1, _MAX_NAME
        yield f"nbytes of field {field.name!r}", field.nbytes, 1, 1 << 40
        yield f"granule_tokens of field {field.name!r}", field.granule_tokens, 1, _MAX_ID


def _head_bounds(tensor: Tensor, kv_heads: int) -> Iterator[_Bound]:
    for h0, h1 in tensor.heads:
        yield "first head of an interval", h0, 0, kv_heads
        yield f"end of the head interval from {h0}", h1, h0 + 1, kv_heads


def _check_fields(where: str, tensor: Tensor, space: Space) -> None:
    first = tensor.fields[0]
    for field in tensor.fields:
        if (field.per, field.headed, field.granule_tokens) != (first.per, first.headed, first.granule_tokens):
            what = f"fields {first.name!r} and {field.name!r} differ in per, headed or granule_tokens"
            _fail(where, what, "one cell has one shape: declare them in two tensors")
    granule = first.granule_tokens
    if space.page_tokens % granule:
        what = f"field {first.name!r}: granule_tokens {granule} does not divide page_tokens {space.page_tokens}"
        _fail(where, what, "a page must hold whole granules")
    if first.per == "page" and granule != space.page_tokens:
        what = f"field {first.name!r} is per page, granule_tokens is {granule}, page_tokens {space.page_tokens}"
        _fail(where, what, "set granule_tokens to the page size")
    if first.per == "request" and not isinstance(space.coverage, Slot):
        what = f"field {first.name!r} is per request, coverage is {type(space.coverage).__name__}"
        _fail(where, what, "put it into a space with coverage Slot")
    deal = canonical(space.deal)
    if deal != Cyclic() and deal.unit_tokens % granule:
        what = f"field {first.name!r}: granule_tokens {granule} does not divide unit_tokens {deal.unit_tokens}"
        _fail(where, what, "deal tokens out in whole granules")


def _check_cells(where: str, tensor: Tensor, granules: int, heads: int) -> None:
    cell = tensor.cell_bytes
    payload = cell * granules * heads
    if tensor.item_bytes != payload:
        what = f"item_bytes is {tensor.item_bytes}, fields, heads and granules of a page make {payload}"
        _fail(where, what, "item_bytes is the payload of one (layer, page)")
    counts = {"layer": len(tensor.layers), "page": tensor.pages, "token": granules, "head": heads}
    axes = sorted((getattr(tensor.strides_bytes, axis), axis) for axis, count in counts.items() if count > 1)
    reach = cell
    for stride, axis in axes:
        if stride < reach:
            what = f"{axis} stride {stride} is less than the {reach} bytes that lie inside it: cells overlap"
            _fail(where, what, "correct strides_bytes")
        reach += stride * (counts[axis] - 1)
    if reach > tensor.nbytes:
        _fail(
            where,
            f"the last cell ends at byte {reach}, nbytes is {tensor.nbytes}",
            "correct nbytes or strides",
        )


def _check_alike(side: str, layout: Layout) -> None:
    """The heads of a layer may lie in several tensors, but they have one shape: peers compare it layer by layer."""
    seen: dict[tuple[str, str, int], tuple[int, Field]] = {}
    for number, tensor in enumerate(layout.tensors):
        for field, layer in itertools.product(tensor.fields, tensor.layers):
            first, other = seen.setdefault((tensor.space, field.name, layer), (number, field))
            what = "" if other is field else next((each for each in SHAPE if _differ(each, other, field)), "")
            if what:
                values = f"{getattr(other, what)!r} and {getattr(field, what)!r}"
                where = f"{side} tensors {first} and {number} (space {tensor.space!r})"
                _fail(where, f"{what} of field {field.name!r} in layer {layer} is {values}", "one layer has one shape")


def _differ(what: str, a: Field, b: Field) -> bool:
    return bool(getattr(a, what) != getattr(b, what))


def _check_distinct(side: str, layout: Layout) -> None:
    """No element twice, and no two tensors that start on the same bytes, unless their spaces share a pool."""
    kinds = kinds_of(layout)
    keys = np.sort(elements(layout, kinds).key)
    twice = keys[1:][keys[1:] == keys[:-1]]
    if len(twice):
        _fail(f"{side} layout", f"held twice: {label(twice[0], kinds)}", "declare each layer and head once")
    reach, before = -1, 0
    places = sorted((tensor.address, tensor.space, number) for number, tensor in enumerate(layout.tensors))
    for address, together in itertools.groupby(places, key=lambda place: place[0]):
        numbers = [number for _, _, number in together]
        overlaid = itertools.pairwise(numbers)
        bad = next((pair for pair in overlaid if not may_overlay(*(layout.tensors[each] for each in pair))), None)
        if bad is None and address < reach:
            bad = before, numbers[0]
        if bad is not None:
            what = f"tensors {min(bad)} and {max(bad)} overlap at {address:#x}"
            hint = "give each its own bytes; two spaces may share a pool: then address, page stride and pages are equal"
            _fail(f"{side} layout", what, hint)
        reach, before = max((reach, before), *((address + layout.tensors[each].cell_bytes, each) for each in numbers))
