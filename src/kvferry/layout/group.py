"""All ranks of one side, as one of them was told of them: what they share out among each other rests on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import msgspec
import numpy as np

from kvferry.errors import LayoutError
from kvferry.layout.check import validate
from kvferry.layout.elements import elements, kinds_of
from kvferry.layout.tensor import Layout


def validate_group(layout: Layout, group: Sequence[Layout], side: str) -> None:
    """Check that a group is one, and has a rank in it.

    Args:
        layout: the rank's own, validated.
        group: of all ranks of its side, itself included; arrangement and addresses don't matter. () is fine.
        side: "prefill" or "decode", for the error text.

    Raises:
        LayoutError: a layout of the group contradicts itself, ranks repeat, the rank is not among them, or is
            declared there as holding something else; or a decode rank that can't be alone has no group.
    """
    ranks = [other.rank for other in group]
    alone = msgspec.structs.replace(layout.rank, pp=0, cp=0, tp=0) == layout.rank
    if side == "decode" and not group and not alone:
        what = f"decode group: {layout.rank} has ranks beside it, and none is declared"
        _fail(what, "pass the layouts of all ranks that serve the same requests: prefill waits for all of them")
    if group and layout.rank not in ranks:
        _fail(f"{side} group: {layout.rank} is not among its ranks {_some(ranks)}", "declare all ranks, this one too")
    for number, other in enumerate(group):
        validate(other, f"{side} group member {number} ({other.rank}):")
        if other.rank in ranks[:number]:
            _fail(f"{side} group: {other.rank} is there twice", "give each rank of the grid once")
        if other.rank == layout.rank and not _hold_the_same(layout, other):
            what = f"{side} group: {layout.rank} has other spaces, layers, fields or heads there than in its own layout"
            _fail(what, "pass the rank's own layout in the group")


def _hold_the_same(one: Layout, other: Layout) -> bool:
    kinds = kinds_of(one)
    ours, theirs = (np.sort(elements(layout, kinds).key) for layout in (one, other))
    if kinds != kinds_of(other) or not np.array_equal(ours, theirs):
        return False
    return {space.name: space for space in one.spaces} == {space.name: space for space in other.spaces}


def _some(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown} and {len(values) - 8} more" if len(values) > 8 else shown


def _fail(what: str, hint: str) -> NoReturn:
    raise LayoutError(what, hint=hint)
