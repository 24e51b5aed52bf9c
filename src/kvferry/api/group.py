"""Agreement between the ranks of one side: the same rooms, the lowest state, release only when all are free.

Every rank calls poll_group in the same step of its loop, with an all-reduce over its group. Ranks that see
different sets of rooms (one has aborted a request that another has not heard of) still make the same calls, so that
no collective hangs, and decide only about rooms that all of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.api.base import BaseRoom
from kvferry.api.kvpoll import KVPoll

I64 = npt.NDArray[np.int64]
MinReduce = Callable[[I64], I64]
"""Element-wise minimum of an int64 array over all ranks; every rank passes the same shape."""

NONE_LEFT = np.iinfo(np.int64).max
BLOCK = 64


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
        rooms: room number (below 2**63) -> sender or receiver of this rank; ranks may hold different sets.
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
    """The rooms that every rank has; one collective where all sets are equal, a merge of blocks where not."""
    digest = hash(tuple(mine)) & (2**62 - 1)
    check = np.array([len(mine), -len(mine), digest, -digest], np.int64)
    low = all_reduce(check)
    if low[0] == -low[1] and low[2] == -low[3]:
        return mine
    return _merge(mine, all_reduce)


def _merge(mine: list[int], all_reduce: MinReduce) -> list[int]:
    """Intersect by proposing the smallest rooms: what not all propose is dropped up to where all have looked."""
    shared: list[int] = []
    rest = list(mine)
    while True:
        block = rest[:BLOCK]
        # how far this rank's block reaches; beyond the shortest reach nothing can be decided yet
        reach = int(all_reduce(np.array([block[-1] if len(rest) > BLOCK else NONE_LEFT], np.int64))[0])
        waiting = int(-all_reduce(np.array([-len(rest)], np.int64))[0])
        if not waiting:
            return shared
        shared += _agree([room for room in block if room <= reach], all_reduce)
        rest = [room for room in rest if room > reach]


def _agree(candidates: list[int], all_reduce: MinReduce) -> list[int]:
    """The candidates that all ranks have: in each step the lowest proposal either is everybody's or is dropped."""
    shared: list[int] = []
    index = 0
    while True:
        proposal = candidates[index] if index < len(candidates) else NONE_LEFT
        low, high = all_reduce(np.array([proposal, -proposal], np.int64)) * np.array([1, -1])
        if high == NONE_LEFT:
            return shared
        if low == high:
            shared.append(int(low))
            index += 1
        else:
            while index < len(candidates) and candidates[index] < high:
                index += 1
