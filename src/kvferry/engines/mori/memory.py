"""Registered memory, of this process or of a peer, and a batch's rows by pairs of regions, as the library wants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvferry.engines.intervals import Intervals
from kvferry.ids import PeerId
from kvferry.plan.batch import U64, Batch


class Held(NamedTuple):
    """A region and the library's descriptor of it."""

    address: int
    nbytes: int
    descriptor: Any


@dataclass(frozen=True)
class Memory:
    """Regions in ascending order.

    Attributes:
        regions: their addresses; unlike elsewhere touching ones are not merged, since a row has to lie in one.
        descriptors: the library's, in the same order.
    """

    regions: Intervals
    descriptors: list[Any]

    @classmethod
    def of(cls, held: Iterable[Held]) -> Memory:
        """Put regions in order."""
        ordered = sorted(held, key=lambda one: one.address)
        starts = np.array([one.address for one in ordered], np.uint64)
        ends = np.array([one.address + one.nbytes for one in ordered], np.uint64)
        return cls(Intervals(starts, ends), [one.descriptor for one in ordered])

    def homes(self, addresses: U64) -> U64:
        """The number of each row's region; all lie in these regions."""
        return (np.searchsorted(self.regions.starts, addresses, side="right") - 1).astype(np.uint64)


class Part(NamedTuple):
    """The rows of a batch between one region here and one there.

    Attributes:
        here, there: the library's descriptors.
        src, dst: offsets in the regions, in bytes.
        nbytes: lengths.
    """

    here: Any
    there: Any
    src: list[int]
    dst: list[int]
    nbytes: list[int]


def parts_of(batch: Batch, here: Memory, there: Memory) -> Iterator[Part]:
    """Give a batch by pairs of regions; all of its rows lie in both memories."""
    mine, theirs = here.homes(batch.src), there.homes(batch.dst)
    pairs = mine * np.uint64(len(there.descriptors)) + theirs
    for pair in np.unique(pairs):
        rows = pairs == pair
        h, t = int(mine[rows.argmax()]), int(theirs[rows.argmax()])
        src, dst = batch.src[rows] - here.regions.starts[h], batch.dst[rows] - there.regions.starts[t]
        yield Part(here.descriptors[h], there.descriptors[t], src.tolist(), dst.tolist(), batch.nbytes[rows].tolist())


def why_not_between(batch: Batch, here: Memory, there: Memory, peer: PeerId) -> str:
    """Say which row does not lie in one region on either side, or ""; by XGMI the library does not look."""
    row = here.regions.first_outside(batch.src, batch.nbytes)
    if row is not None:
        return f"row {row} of {len(batch)}, {int(batch.nbytes[row])} bytes, lies in no single region of this process"
    row = there.regions.first_outside(batch.dst, batch.nbytes)
    if row is None:
        return ""
    return (
        f"row {row} of {len(batch)}, {int(batch.nbytes[row])} bytes at {int(batch.dst[row]):#x} there, does not lie in "
        f"one registered region of peer {peer}"
    )
