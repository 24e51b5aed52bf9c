"""The processes of the measurement of connected peers: one node, or many of them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from kvferry.api import KVArgs, KVClassType, KVManager, KVReceiver, KVSender, get_kv_class
from kvferry.api.room import Room
from kvferry.bench.habits import until_success
from kvferry.bench.machine import memory_kb
from kvferry.bench.transfer_spec import PAGE_TOKENS, manager_settings
from kvferry.presets import page_major

PAGES = 64
LIMIT_S = 120.0
CALM = {"tick_s": 1.0, "heartbeat_s": 10.0, "heartbeat_timeout_s": 60.0, "bootstrap_timeout_s": 120.0,
        "claim_timeout_s": 120.0, "stall_s": 60.0}  # fmt: skip
"""Settings of peers that share a processor with a hundred others; the hub has the defaults, but for its patience."""
PATIENT = {name: CALM[name] for name in ("heartbeat_timeout_s", "bootstrap_timeout_s", "claim_timeout_s", "stall_s")}


class Setup(msgspec.Struct, frozen=True):
    """What such a process is told."""

    engine: str
    mechanism: str | None
    side: str
    digest: str


class Nodes:
    """Managers with tiny pools, and the rooms that are open on them."""

    takes = Setup
    settings: dict[str, float] = CALM

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.managers: list[KVManager] = []
        self.fresh: list[KVManager] = []
        self.rooms: list[Room] = []

    def hello(self) -> Any:
        """Nothing to say yet."""

    def grow(self, count: int) -> list[str]:
        """Make more managers; the next rooms are theirs. Returns their addresses."""
        layout = page_major("bench", layers=1, kv_heads=1, head_dim=2, dtype="uint8", pages=PAGES,
                            page_tokens=PAGE_TOKENS)  # fmt: skip
        kind = get_kv_class(self.setup.engine, KVClassType.MANAGER)
        chosen = {**self.settings, **manager_settings(self.setup.mechanism, self.setup.digest)}
        nbytes = max(tensor.address + tensor.nbytes for tensor in layout.tensors)
        self.fresh = []
        for _ in range(count):
            self.fresh.append(kind(KVArgs(layout, [np.zeros(nbytes, np.uint8)]), self.setup.side, **chosen))
            self.managers.append(self.fresh[-1])
        return [manager.endpoint for manager in self.fresh]

    def offer(self, rooms: list[int]) -> None:
        """Send one page in each room."""
        for page, (manager, room) in enumerate(zip(self._owners(len(rooms)), rooms, strict=True)):
            sender = KVSender(manager, None, room)
            self.rooms.append(sender)
            sender.init(1)
            sender.send(np.array([page], np.int32))

    def claim(self, rooms: list[int], endpoints: list[str]) -> None:
        """Receive one page in each room."""
        owners = self._owners(len(rooms))
        for page, (manager, room, endpoint) in enumerate(zip(owners, rooms, endpoints, strict=True)):
            receiver = KVReceiver(manager, None, room, peers=[endpoint])
            self.rooms.append(receiver)
            receiver.init()
            receiver.send_metadata(np.array([page], np.int32))

    def finish(self) -> None:
        """Wait until all rooms have succeeded, and give them back."""
        until_success(self.rooms, "wait", LIMIT_S)
        for room in self.rooms:
            room.clear()
        self.rooms.clear()

    def close(self) -> None:
        """Leave without a farewell: a thousand orderly goodbyes take long, and the other end is leaving, too."""
        os._exit(0)

    def _owners(self, count: int) -> Iterable[KVManager]:
        return self.fresh if len(self.fresh) == count else self.managers * count


class Crowd(Nodes):
    """Many nodes."""


class Hub(Nodes):
    """The one node whose memory is read."""

    settings = PATIENT

    def hello(self) -> Any:
        """Its address."""
        return self.grow(1)[0]

    def memory(self) -> dict[str, int]:
        """Memory of this process in KB, and how many descriptors are open."""
        gc.collect()
        return {**memory_kb(), "open_files": len(os.listdir("/proc/self/fd"))}
