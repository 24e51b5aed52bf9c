"""Which room a page of the decode pool was named for last: two live rooms may not fill the same page."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.ids import KVPoll
from kvferry.node.view import RoomView


class HeldPages:
    """The pages of a decode rank's pool and the rooms that may still write them."""

    def __init__(self, pages: Mapping[str, int]) -> None:
        """Start with every page free.

        Args:
            pages: pages of each pool, by the name of its space, or spaces.
        """
        self._lock = threading.Lock()
        self._turns = itertools.count(1)
        self._turn_of = {space: np.zeros(count, np.int64) for space, count in pages.items()}
        self._rooms: dict[int, RoomView] = {}

    def take(self, view: RoomView, pages: Mapping[str, npt.NDArray[np.int32]]) -> None:
        """Note the pages of a room.

        Raises:
            InputError: a page is named twice, or belongs to a room that is not release-safe yet.
        """
        pages = {space: numbers for space, numbers in pages.items() if space in self._turn_of}
        for space, numbers in pages.items():
            self._refuse_twice(view, space, numbers)
        with self._lock:
            self._rooms = {turn: room for turn, room in self._rooms.items() if not _is_free(room)}
            for space, numbers in pages.items():
                self._refuse_held(view, space, numbers)
            turn = next(self._turns)
            self._rooms[turn] = view
            for space, numbers in pages.items():
                self._turn_of[space][numbers] = turn

    @staticmethod
    def _refuse_twice(view: RoomView, space: str, numbers: npt.NDArray[np.int32]) -> None:
        counts = np.bincount(numbers)
        if len(numbers) and counts.max() > 1:
            raise InputError(
                f"decode room {view.room}: page {counts.argmax()} of space {space!r} is named {counts.max()} times",
                hint="each page is filled once",
            )

    def _refuse_held(self, view: RoomView, space: str, numbers: npt.NDArray[np.int32]) -> None:
        turns = self._turn_of[space][numbers]
        for turn in np.unique(turns).tolist():
            holder = self._rooms.get(turn)
            if holder is not None:
                page = int(numbers[np.flatnonzero(turns == turn)[0]])
                raise InputError(
                    f"decode room {view.room}: page {page} of space {space!r} was named for room {holder.room}, "
                    f"which is {holder.poll.name} and may still write it",
                    hint="use a page again only after is_release_safe() of the room that had it",
                )


def _is_free(view: RoomView) -> bool:
    return view.released or view.poll is KVPoll.Success
