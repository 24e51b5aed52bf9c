"""Registered memory, of this process or of a peer: the device of each row, and rows as the library takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.engines.intervals import Intervals
from kvferry.engines.seam import Region
from kvferry.ids import PeerId
from kvferry.plan.batch import U64, Batch

I64 = npt.NDArray[np.int64]
HOST, DEVICE = "DRAM", "VRAM"


@dataclass(frozen=True)
class Memory:
    """Regions in ascending order.

    Attributes:
        intervals: the addresses, merged.
        starts: uint64[N] first address of each region.
        devices: int64[N] its device; -1 is host memory.
        is_host: whether all of it is host memory.
    """

    intervals: Intervals
    starts: U64
    devices: I64
    is_host: bool

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Memory:
        """Put regions in order."""
        ordered = sorted(regions, key=lambda region: region.address)
        starts = np.array([region.address for region in ordered], np.uint64)
        ends = np.array([region.address + region.nbytes for region in ordered], np.uint64)
        devices = np.array([one.device for one in ordered], np.int64)
        return cls(Intervals.merged(starts, ends), starts, devices, bool((devices < 0).all()))

    def devices_of(self, addresses: U64) -> I64:
        """The device of each address; all lie in these regions."""
        return self.devices[np.searchsorted(self.starts, addresses, side="right") - 1]


class Rows(NamedTuple):
    """One side's rows of a transfer, all of one kind of memory.

    Attributes:
        kind: "DRAM" or "VRAM".
        table: uint64[N, 3]: address, length, device.
    """

    kind: str
    table: U64


def split(batch: Batch, here: Memory, there: Memory) -> Iterator[tuple[Rows, Rows]]:
    """Give a batch as transfers, since each side of one must be of one kind: one, unless it mixes host and device."""
    if here.is_host and there.is_host:  # looking at each row would take longer than the library needs for all of them
        yield _host_rows(batch.src, batch.nbytes), _host_rows(batch.dst, batch.nbytes)
        return
    mine, theirs = here.devices_of(batch.src), there.devices_of(batch.dst)
    kinds = (mine >= 0) * 2 + (theirs >= 0)
    for kind in np.unique(kinds):
        rows = slice(None) if (kinds == kind).all() else kinds == kind
        yield (
            _rows(batch.src[rows], batch.nbytes[rows], mine[rows]),
            _rows(batch.dst[rows], batch.nbytes[rows], theirs[rows]),
        )


def why_not_there(batch: Batch, there: Memory, peer: PeerId) -> str:
    """Say which destination row does not lie in what a peer has registered, or ""."""
    row = there.intervals.first_outside(batch.dst, batch.nbytes)
    if row is None:
        return ""
    return (
        f"row {row} of {len(batch)}, {int(batch.nbytes[row])} bytes at {int(batch.dst[row]):#x} there, does not lie in "
        f"one registered region of peer {peer}"
    )


def host_row(address: int, nbytes: int) -> Rows:
    """One row of host memory."""
    return Rows(HOST, np.array([[address, nbytes, 0]], np.uint64))


def _host_rows(addresses: U64, nbytes: U64) -> Rows:
    table = np.zeros((len(addresses), 3), np.uint64)
    table[:, 0], table[:, 1] = addresses, nbytes
    return Rows(HOST, table)


def _rows(addresses: U64, nbytes: U64, devices: I64) -> Rows:
    rows = _host_rows(addresses, nbytes)
    if devices[0] < 0:
        return rows
    rows.table[:, 2] = devices
    return Rows(DEVICE, rows.table)
