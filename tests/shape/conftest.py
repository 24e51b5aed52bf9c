"""Worlds that are shut down after each test, which must leave no thread and no descriptor behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the schedulers are modules of their own: child processes import them

from sglang_scheduler import World

from kvferry import KVBootstrapServer


def _left_over() -> tuple[list[str], int]:
    threads = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
    return threads, len(os.listdir("/proc/self/fd"))


def _settled() -> tuple[list[str], int]:
    """What is there once the garbage of earlier tests is gone and nothing changes any more."""
    gc.collect()
    before, since, deadline = _left_over(), time.monotonic(), time.monotonic() + 2.0
    while time.monotonic() < min(since + 0.1, deadline):
        time.sleep(0.01)
        if (now := _left_over()) != before:
            before, since = now, time.monotonic()
    return before


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = _settled()
    yield
    deadline = time.monotonic() + 3.0
    while _left_over() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _left_over() == before
    assert not [name for name in _left_over()[0] if name.startswith("kvferry-")]


@pytest.fixture
def bootstrap_addr(nothing_left_behind: None) -> Iterator[str]:
    with KVBootstrapServer("127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.port}"


@pytest.fixture
def make_world(bootstrap_addr: str) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**options: Any) -> World:
        worlds.append(World(bootstrap_addr, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
