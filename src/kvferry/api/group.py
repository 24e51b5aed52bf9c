"""Agreement between the ranks of one side: the same rooms, the lowest state, release only when all are free.

Every rank calls poll_group in the same step of its loop, with an all-reduce over its group. Ranks that see
different sets of rooms (one has aborted a request that another has not heard of) still make the same calls, so that
no collective hangs, and decide only about rooms that all of them have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.api.base import BaseRoom
from kvferry.api.kvpoll import KVPoll

I64 = npt.NDArray[np.int64]
MinReduce = Callable[[I64], I64]
"""Element-wise minimum of an int64 array over all ranks; every rank passes the same shape."""

MIX = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: spreads consecutive room numbers."""
SALT = 0x51ED270B


class GroupState(NamedTuple):
    """What all ranks know of a room.

    Attributes:
        poll: the lowest state of any rank.
        is_release_safe: the pages are free on every rank.
    """

    poll: KVPoll
    is_release_safe: bool


def poll_group(rooms: Mapping[int, BaseRoom], all_reduce: MinReduce) -> dict[int, GroupState]:
    """Poll rooms on all ranks of a group.

    Args:
        rooms: room number (below 2**63 - 1) -> sender or receiver of this rank; ranks may hold different sets.
        all_reduce: the group's element-wise minimum.

    Returns:
        The state of the rooms that every rank has, in ascending order; the same on every rank.
    """
    shared = _shared(sorted(rooms), all_reduce)
    if not shared:
        return {}
    states = [rooms[room].poll() for room in shared]
    safe = [rooms[room].is_release_safe() for room in shared]
    found = all_reduce(np.array([states, safe], np.int64))
    return {
        room: GroupState(KVPoll(int(poll)), bool(free))
        for room, poll, free in zip(shared, found[0], found[1], strict=True)
    }


def _shared(mine: list[int], all_reduce: MinReduce) -> list[int]:
    """The rooms that every rank has; one collective where all sets are equal, a few more where not."""
    digest = hash(tuple(mine)) & (2**62 - 1)
    check = np.array([len(mine), -len(mine), digest, -digest], np.int64)
    low = all_reduce(check)
    if low[0] == -low[1] and low[2] == -low[3]:
        return mine
    return _intersect(mine, int(-low[1]), all_reduce)


def _intersect(mine: list[int], most: int, all_reduce: MinReduce) -> list[int]:
    """The rooms that every rank has, in a few collectives of equal shape.

    Each rank puts its rooms into a table by a hash. A cell in which no rank has two rooms is decided: it is shared if
    its lowest and highest value are the same. The rooms of the other cells are tried again with another hash.
    """
    shared: list[int] = []
    rest, size = np.array(mine, np.int64), 8 * most
    for salt in itertools.count():
        cells = _cells(rest, size, salt)
        low = all_reduce(np.concatenate(_tables(rest, cells, size)))
        lowest, highest, crowded = low[:size], -low[size : 2 * size], -low[2 * size :]
        shared += (lowest[(lowest == highest) & (lowest > 0) & (crowded == 0)] - 1).tolist()
        if not crowded.any():
            break
        rest = rest[crowded[cells] > 0]
    return sorted(shared)


def _tables(rooms: I64, cells: I64, size: int) -> list[I64]:
    """Room + 1 in each cell that has one, the same negated, and -1 in each cell that has several."""
    counts = np.bincount(cells, minlength=size)
    table = np.zeros(size, np.int64)
    table[cells] = rooms + 1
    return [table, -table, -(counts > 1).astype(np.int64)]


def _cells(rooms: I64, size: int, salt: int) -> I64:
    mixed = (rooms.astype(np.uint64) ^ np.uint64(salt * SALT)) * MIX
    mixed = (mixed ^ (mixed >> np.uint64(29))) * MIX  # twice, so that another salt parts what met with this one
    cells: I64 = ((mixed >> np.uint64(32)) % np.uint64(size)).astype(np.int64)
    return cells
