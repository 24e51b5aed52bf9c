"""Sets of address intervals, checked for many rows at once."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.plan.batch import U64

_FEW = 64
"""Rows that are looked at sooner one by one than by numpy."""


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals [starts[i], ends[i]) in ascending order; touching ones are one.

    Attributes:
        starts: uint64[N] first addresses.
        ends: uint64[N] addresses past the end.
    """

    starts: U64
    ends: U64

    @classmethod
    def none(cls) -> Intervals:
        """The empty set."""
        return cls(np.zeros(0, np.uint64), np.zeros(0, np.uint64))

    @classmethod
    def merged(cls, starts: U64, ends: U64) -> Intervals:
        """Sort and merge intervals that overlap or touch; empty ones are dropped.

        Args:
            starts: uint64[N] first addresses, in any order.
            ends: uint64[N] addresses past the end.
        """
        order = np.argsort(starts, kind="stable")
        order = order[ends[order] > starts[order]]
        if not len(order):
            return cls.none()
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        first = np.concatenate([[True], starts[1:] > reach[:-1]])
        last = np.concatenate([first[1:], [True]])
        return cls(starts[first], reach[last])

    def first_outside(self, addresses: U64, nbytes: U64) -> int | None:
        """Find the first row that does not lie in one interval.

        A row of no bytes, or one that runs past the end of the address space, lies in none.

        Args:
            addresses: uint64[N] where each row starts.
            nbytes: uint64[N] its length.

        Returns:
            The row's index, or None when every row lies inside.
        """
        if not len(addresses):
            return None
        if not len(self.starts):
            return 0
        if len(addresses) <= _FEW:
            return self._first_of_few(addresses.tolist(), nbytes.tolist())
        ends = addresses + nbytes
        home = np.searchsorted(self.starts, addresses, side="right") - 1
        bad = (ends <= addresses) | (home < 0) | (ends > self.ends[np.maximum(home, 0)])
        row = int(bad.argmax())
        return row if bad[row] else None

    def _first_of_few(self, addresses: list[int], nbytes: list[int]) -> int | None:
        starts, ends = self._lists
        for row, (address, length) in enumerate(zip(addresses, nbytes, strict=True)):
            home = bisect_right(starts, address) - 1
            if home < 0 or not length or address + length > ends[home]:
                return row
        return None

    @cached_property
    def _lists(self) -> tuple[list[int], list[int]]:
        return self.starts.tolist(), self.ends.tolist()
