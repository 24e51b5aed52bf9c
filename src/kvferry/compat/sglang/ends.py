"""What a sender and a receiver have in common: a scheduler's thread never gets an exception from a bad peer or room."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base import KVPoll as SglPoll
from sglang.srt.disaggregation.base.conn import KVTransferMetric

from kvferry.api.room import Room
from kvferry.compat.sglang.states import States
from kvferry.errors import KvferryError, KVTransferError

log = logging.getLogger("kvferry.sglang")


class RoomFailedError(Exception):
    """What `failure_exception` raises.

    Attributes:
        bootstrap_room: the room.
        failure_reason: the whole text.
        is_from_another_rank: SGLang mutes what another rank has said already.
    """

    def __init__(self, room: int, reason: str, *, is_from_another_rank: bool = False) -> None:
        super().__init__(reason)
        self.bootstrap_room = room
        self.failure_reason = reason
        self.is_from_another_rank = is_from_another_rank


class End:
    """One room of one rank, over a kvferry sender or receiver."""

    kv_mgr: Any
    bootstrap_room: int

    def __init__(self, mgr: Any, room: int | None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = 0 if room is None else room
        self.num_tokens: int | None = None
        self.tag = 0
        self._room: Room | None = None
        self._error = ""
        self._is_aborted = False

    def tell_request(self, num_tokens: int, tag: int) -> None:
        """Which request it is (see `requests`)."""
        self.num_tokens, self.tag = num_tokens, tag

    @property
    def conclude_state(self) -> int | None:
        """SGLang's Failed or Success, once it has ended."""
        state = self.poll()
        return state if state in {SglPoll.Failed, SglPoll.Success} else None

    def poll(self) -> int:
        """The state, as SGLang's schedulers know it: the numbers are the same."""
        if self._error or self._is_aborted or self._room is None:
            return int(SglPoll.Failed)
        return int(self._room.poll())

    def failure_exception(self) -> None:
        """Raise why the room failed; a rank whose own room has not failed hears that another one's has, and ends it."""
        if self._error or self._room is None:
            raise RoomFailedError(self.bootstrap_room, self._error or "the room was never opened")
        error = self._room.failure()
        if error is None:
            words = "aborted by SGLang's scheduler" if self._is_aborted else "another rank of this side has failed"
            self._end(words)
            raise RoomFailedError(self.bootstrap_room, words, is_from_another_rank=True)
        raise RoomFailedError(
            self.bootstrap_room, str(error), is_from_another_rank=error.is_from_another_rank
        ) from error

    def abort(self) -> None:
        """End the room from this side; the other side hears it."""
        if not self._error:
            self._end("aborted by SGLang's scheduler")

    def clear(self) -> None:
        """The scheduler is done with the room."""
        if self._room is not None:
            self._room.clear()

    def get_transfer_metric(self) -> KVTransferMetric:
        """Seconds from the first pages to Success, seconds until then, bytes."""
        if self._room is None:
            return KVTransferMetric()
        found = self._room.get_transfer_metric()
        return KVTransferMetric(found.transfer_latency_s, found.alloc_latency_s, found.transfer_total_bytes)

    # -- helpers

    def _opened(self, room: Room) -> None:
        """Keep the room; it is given back with this object, as not every path of the schedulers clears."""
        self._room = room
        weakref.finalize(self, room.clear).atexit = False

    def _end(self, words: str) -> None:
        self._is_aborted = True
        if self._room is not None:
            self._room.abort(words)

    def _do(self, what: str, action: Callable[[], None]) -> None:
        """Carry out a call of the scheduler; what is wrong about it fails this room and is logged."""
        if self._error:
            return
        try:
            action()
        except (KvferryError, KVTransferError) as error:
            self._error = f"{what}: {error}"
            log.warning("room %d failed in %s: %s", self.bootstrap_room, what, error)
            if self._room is not None:
                self._room.abort(self._error)

    def _state_lists(self, state_indices: Any, prefix_tokens: int) -> dict[str, npt.NDArray[np.int32]]:
        """SGLang's list, parallel to its kinds of state, as lists by space."""
        if state_indices is None:
            return {}
        states: States = self.kv_mgr.states
        return states.named(state_indices, prefix_tokens)
