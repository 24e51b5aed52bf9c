"""Group `leaks`: what is left behind by peers that come and go: threads, descriptors, memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.engines.seam import Outcome
from kvferry.ids import PeerId
from kvferry.testing.suite_base import SuiteBase
from kvferry.testing.suite_memory import new_pool
from kvferry.testing.suite_pair import End, Pair, open_over

_POOL = 64 << 10
_WARM_UPS = 8
"""Attachments after which an engine has all the threads that it keeps for its peers."""
_LEAK_BYTES = 4096
SETTLE_S = 10.0
"""How long what is left behind may take to go."""
_NOISE_BYTES = 1 << 20
"""What an interpreter's memory goes up and down by without any leak."""


class Leaks(SuiteBase):
    """Counted before and after."""

    group: ClassVar[str] = "leaks"

    def test_attaching_and_detaching_leaves_no_descriptor_no_thread_and_no_memory(self) -> None:
        """Also with engines that are opened and closed; unknown peers and a second close are ignored."""
        self.pair.close()
        self._pools = [new_pool(self.provider(), _POOL) for _ in range(2)]
        for number in range(4):
            self.cycle(number)
        before, resident = _settled(resources), []
        for number in range(self.cycles):
            self.cycle(number)
            resident.append(resident_bytes())
        _wait_for(lambda: resources() == before)
        assert resources() == before
        assert slope_of(resident) < _LEAK_BYTES + _NOISE_BYTES / self.cycles

    def test_a_peer_that_was_killed_leaves_nothing_once_it_is_detached(self) -> None:
        """Neither at its target nor at its writer."""
        for _ in range(_WARM_UPS):
            assert self.pair.attach().outcome is Outcome.LANDED
            self.pair.writer.engine.detach(self.pair.target.me)
        self._visit()
        self._settles(self._visit, repeats=1)

    def test_attaching_again_and_again_leaves_nothing_while_both_processes_live(self) -> None:
        """As peers do whose control connection breaks now and then."""
        self._come_and_go()
        self._settles(self._come_and_go)

    def _settles(self, once: Callable[[], None], repeats: int = 20, rounds: int = 5) -> None:
        """Two of some rounds in a row add nothing: what an engine starts once, and keeps for all peers, is no leak."""
        found = [_settled(self._polled)]
        for _ in range(rounds):
            for _ in range(repeats):
                once()
            _wait_for(lambda: _is_within(self._polled(), found[-1]))
            found.append(self._polled())
            if len(found) > 2 and _is_within(found[-1], found[-2]) and _is_within(found[-2], found[-3]):
                return
        pytest.fail(f"each of {repeats} leaves something: (descriptors, threads) {found}")

    def _come_and_go(self) -> None:
        """What a connection does in its life, the writer leaving first."""
        assert self.pair.attach().outcome is Outcome.LANDED
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.LANDED
        self.pair.writer.engine.detach(self.pair.target.me)
        self.pair.target.engine.detach(self.pair.writer.me)
        self.pair.step()

    def cycle(self, number: int) -> None:
        """Open, attach, write, detach on either side first, in turns; close twice."""
        ends = [
            open_over(self.make_engine(), incarnation, pool, dict(self.options), self.provider())
            for incarnation, pool in enumerate(self._pools, 1)
        ]
        pair = Pair(ends[0], ends[1])
        assert pair.attach().outcome is Outcome.LANDED
        assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED
        order: list[tuple[End, PeerId]] = [(pair.writer, pair.target.me), (pair.target, pair.writer.me)]
        for end, peer in order if number % 2 else order[::-1]:
            end.engine.detach(peer)
            end.engine.detach(peer)
        pair.step()
        pair.close()
        pair.close()

    def _visit(self) -> None:
        """A process that is written to, writes itself, and is killed."""
        process = self.spawn_target()
        self.pair.target.grant(process.peer)
        attached = process.attach(self.pair.target.me, self.pair.target.engine.describe())
        assert attached["outcome"] == Outcome.LANDED.value, attached
        assert self.write_to(process).outcome is Outcome.LANDED
        process.kill()
        self._processes.remove(process)
        for end in (self.pair.writer, self.pair.target):
            end.engine.detach(process.peer)

    def _polled(self) -> tuple[int, int]:
        self.pair.step()
        return resources()


def resources() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threads()


def threads() -> int:
    """Threads of this process as the kernel counts them, those of foreign libraries included."""
    return max(len(os.listdir("/proc/self/task")), threading.active_count())


def resident_bytes() -> int:
    """What of this process's memory is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope_of(resident: list[int]) -> float:
    """Bytes per cycle by which memory grows: from the middle half of the first part to that of the last.

    Medians, because a cycle may catch memory that was freed a moment later; the first tenth is left out, in which
    caches fill.
    """
    kept: npt.NDArray[np.float64] = np.array(resident[len(resident) // 10 :], np.float64)
    half = len(kept) // 2
    if half < 1:
        return 0.0
    return float(np.median(kept[half:]) - np.median(kept[:half])) / half


def _settled(measure: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """What is measured once it has not changed for 0.3 s: what ends a moment later is no part of the baseline."""
    until, last, since = time.monotonic() + SETTLE_S, measure(), time.monotonic()
    while time.monotonic() < min(until, since + 0.3):
        time.sleep(0.02)
        now = measure()
        if now != last:
            last, since = now, time.monotonic()
    return last


def _is_within(now: tuple[int, int], before: tuple[int, int]) -> bool:
    return all(count <= earlier for count, earlier in zip(now, before, strict=True))


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SETTLE_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
