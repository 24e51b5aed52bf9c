"""One side of `kvferry bench rooms`, in a process of its own: a scheduler with one habit."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from kvferry.api import KVArgs, KVClassType, KVManager, KVReceiver, KVSender, get_kv_class
from kvferry.bench.failure import BenchError
from kvferry.bench.habits import pass_time, until_claimed, until_success
from kvferry.bench.machine import memory_kb
from kvferry.bench.pattern import fill, first_difference
from kvferry.bench.transfer_spec import PAGE_TOKENS, ROW_BYTES, manager_settings
from kvferry.bench.window import Window
from kvferry.pool import allocate_pool
from kvferry.presets import page_major

LIMIT_S = 30.0
"""Longest time for one room."""
GAP_S = 1e-3
"""From the pages being named to the send: both schedulers have come to rest by then."""


class Setup(msgspec.Struct, frozen=True):
    """What a side is told: pages of request_bytes each, one per request."""

    engine: str
    mechanism: str | None
    request_bytes: int
    pages: int
    digest: str


class RoomsSide:
    """A pool and a manager."""

    takes = Setup

    def __init__(self, setup: Setup, side: str) -> None:
        self.setup = setup
        self.pool = allocate_pool(setup.pages * setup.request_bytes)
        self.rows = self.pool.array[: setup.pages * setup.request_bytes].view(np.uint64).reshape(setup.pages, -1)
        layout = page_major(
            "bench", layers=1, kv_heads=1, head_dim=setup.request_bytes // ROW_BYTES, dtype="uint8",
            pages=setup.pages, page_tokens=PAGE_TOKENS,
        )  # fmt: skip
        manager = get_kv_class(setup.engine, KVClassType.MANAGER)
        args = KVArgs(layout, [self.pool])
        self.manager: KVManager = manager(args, side, **manager_settings(setup.mechanism, setup.digest))

    def hello(self) -> dict[str, Any]:
        """The control plane's address."""
        return {"endpoint": self.manager.endpoint, "pool_page_bytes": self.pool.page_bytes}

    def info(self) -> dict[str, Any]:
        """What the engine says of itself."""
        info: dict[str, Any] = self.manager.info()["engine_info"]
        return info

    def memory(self) -> dict[str, int]:
        """Memory of this process in KB."""
        return memory_kb()

    def idle(self, seconds: float) -> float:
        """Do nothing for a while; returns the percentage of one processor that all threads used."""
        cpu_s, begin_s = time.process_time(), time.monotonic()
        time.sleep(seconds)
        return 100 * (time.process_time() - cpu_s) / (time.monotonic() - begin_s)

    def close(self) -> None:
        """Stop."""
        self.manager.shutdown()


class PrefillSide(RoomsSide):
    """Sends one request after the other, or many at once."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "prefill")

    def one_by_one(self, first_room: int, count: int, habit: str, switch_interval_s: float | None) -> list[float]:
        """Send `count` requests, each when its pages are named and a millisecond has passed; returns when."""
        with switch_interval(switch_interval_s):
            return [self._one(room, habit) for room in range(first_room, first_room + count)]

    def _one(self, room: int, habit: str) -> float:
        page = room % self.setup.pages
        fill(self.rows[page], room)
        sender = KVSender(self.manager, None, room)
        sender.init(1)
        until_claimed([sender], habit, LIMIT_S)
        pass_time(habit, GAP_S)
        pages = np.array([page], np.int32)
        begin_s = time.monotonic()
        sender.send(pages)
        until_success([sender], habit, LIMIT_S)
        sender.clear()
        return begin_s

    def many(self, first_room: int, count: int, window: int) -> float:
        """Send `count` requests with `window` in flight; returns when the first was opened."""
        begin_s = time.monotonic()
        Window(window, LIMIT_S).run(range(first_room, first_room + count), self._begin)
        return begin_s

    def _begin(self, page: int, room: int) -> KVSender:
        self.rows[page, 0] = self.rows[page, -1] = room
        sender = KVSender(self.manager, None, room)
        sender.init(1)
        sender.send(np.array([page], np.int32))
        return sender


class DecodeSide(RoomsSide):
    """Receives what the prefill side sends, in the same order of rooms."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "decode")

    def one_by_one(
        self, first_room: int, count: int, habit: str, switch_interval_s: float | None, endpoint: str
    ) -> list[float]:
        """Receive `count` requests; returns when each was there. Raises BenchError if its bytes are wrong."""
        with switch_interval(switch_interval_s):
            return [self._one(room, habit, endpoint) for room in range(first_room, first_room + count)]

    def _one(self, room: int, habit: str, endpoint: str) -> float:
        page = (room + 1) % self.setup.pages
        receiver = self._begin(page, room, endpoint)
        until_success([receiver], habit, LIMIT_S)
        end_s = time.monotonic()
        receiver.clear()
        at = first_difference(self.rows[page], room)
        if at >= 0:
            raise BenchError(f"wrong bytes at the decode side: room {room}, byte {8 * at} of page {page} differs")
        return end_s

    def many(self, first_room: int, count: int, window: int, endpoint: str) -> float:
        """Receive `count` requests with `window` in flight; returns when the last was there.

        Raises:
            BenchError: the first or last word of a request is not its own.
        """
        rooms = range(first_room, first_room + count)
        Window(window, LIMIT_S).run(rooms, lambda page, room: self._begin(page, room, endpoint), self._check_ends)
        return time.monotonic()

    def _begin(self, page: int, room: int, endpoint: str) -> KVReceiver:
        receiver = KVReceiver(self.manager, None, room, peers=[endpoint])
        receiver.init()
        receiver.send_metadata(np.array([page], np.int32))
        return receiver

    def _check_ends(self, page: int, room: int) -> None:
        found = int(self.rows[page, 0]), int(self.rows[page, -1])
        if found != (room, room):
            raise BenchError(
                f"wrong bytes at the decode side: room {room}, page {page} begins and ends with {found}, "
                f"{(room, room)} was sent"
            )


@contextmanager
def switch_interval(seconds: float | None) -> Iterator[None]:
    """Set Python's switch interval for the whole process, and set it back."""
    before = sys.getswitchinterval()
    if seconds is not None:
        sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
