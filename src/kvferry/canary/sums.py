"""What the canary sees: windows are weighed, and the weights added up per layer and per page of the destination."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvferry.canary.places import MIX, Look, Windows, mixed
from kvferry.layout.deal import I64
from kvferry.plan.batch import U64

_WEIGHTS = (np.arange(1, 16, 2, dtype=np.uint64) * MIX) | np.uint64(1)


class Sums(NamedTuple):
    """A digest.

    Attributes:
        layers: uint64[L] one sum per layer, ascending.
        pages: uint64[P] one sum per page of the destination that holds a part.
    """

    layers: U64
    pages: U64


def weigh(windows: Windows, content: U64) -> U64:
    """uint64[N]: what each window counts, given its bytes as uint64[N, 8] (shorter ones padded with zeros)."""
    return mixed(content @ _WEIGHTS + windows.key)


def no_sums(seen: Look) -> Sums:
    """Where to add up."""
    return Sums(np.zeros(len(seen.layers), np.uint64), np.zeros(seen.pages, np.uint64))


def add(sums: Sums, seen: Look, windows: Windows, values: U64) -> None:
    """Add what a block of windows counts."""
    for into, position in ((sums.layers, windows.layer), (sums.pages, windows.there - seen.first_page)):
        if len(into) == 1:  # of arrays: numbers would complain of an overflow
            np.add(into, np.add.reduce(values, keepdims=True), out=into)
        else:
            np.add.at(into, position, values)


def cells(windows: Windows, seen: Look) -> tuple[I64, I64]:
    """Group windows by (layer, page), for digests that read them one after the other.

    Returns:
        int64[N] order in which to read, and int64[C + 1] where in that order each cell begins, and the end.
    """
    cell = windows.layer * seen.pages + windows.there - seen.first_page
    order = np.argsort(cell, kind="stable")
    begins = np.flatnonzero(np.diff(cell[order], prepend=-1))
    return order, np.append(begins, len(order))


def difference(space: str, seen: Look, mine: Sums, theirs: Sums, pages: list[int]) -> str:
    """Say which layers and pages differ, "" if none does.

    Args:
        space: name of the space.
        seen: what was looked at here, on the destination's side.
        mine: of what landed.
        theirs: of what was sent.
        pages: page numbers of the destination, from seen.first_page on.
    """
    if len(mine.layers) != len(theirs.layers) or len(mine.pages) != len(theirs.pages):
        return (
            f"space {space!r}: the digest of what was sent is of {len(theirs.layers)} layers and {len(theirs.pages)} "
            f"pages, that of what landed of {len(mine.layers)} and {len(mine.pages)}"
        )
    layers = seen.layers[mine.layers != theirs.layers].tolist()
    numbers = np.flatnonzero(mine.pages != theirs.pages).tolist()
    if not layers and not numbers:
        return ""
    named = [f"{number} (page {pages[number]} of the pool)" for number in numbers]
    return f"space {space!r}: {_listed('layer', layers)}, {_listed('page', named)} of the request"


def _listed(what: str, values: list[int] | list[str]) -> str:
    shown = ", ".join(str(value) for value in values[:4])
    more = f" and {len(values) - 4} more" if len(values) > 4 else ""
    return f"{what}{'s' if len(values) > 1 else ''} {shown}{more}"
