"""Group `fork`: a forked child has the engine's descriptors and none of its threads.

The process that opened an engine is the one that uses it. What a child does with its copy is refused, or fails, or
crashes the child; the parent and its peers don't notice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from kvferry.engines.seam import Outcome
from kvferry.testing.suite_base import SuiteBase
from kvferry.testing.suite_pair import Pair

_CHILD_S = 5
_ROWS = 20


class Fork(SuiteBase):
    """The parent writes on, exactly, whatever its child did."""

    group: ClassVar[str] = "fork"

    @pytest.mark.parametrize("child", ["idle", "polls", "writes", "attaches", "detaches", "closes"])
    def test_a_forked_child_does_not_disturb_its_parent(self, child: str) -> None:
        """It holds both ends, and uses them one after the other."""
        assert self.pair.attach().outcome is Outcome.LANDED
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.LANDED
        _in_a_child(lambda: _use(child, self.pair))
        self._check_parent()

    def test_what_a_parent_has_under_way_lands_while_a_child_closes(self) -> None:
        """The tickets were submitted before the fork."""
        assert self.pair.attach().outcome is Outcome.LANDED
        tickets = [self.pair.submit(self.pair.batch([at], [at], [1000])) for at in range(0, _ROWS * 1000, 1000)]
        _in_a_child(lambda: _use("closes", self.pair))
        assert all(done.outcome is Outcome.LANDED for done in self.settle_all(tickets))
        self._check_parent()

    def _check_parent(self) -> None:
        """The attachment still works, byte for byte, and so does a new one."""
        pair = self.pair
        for _ in range(2):
            pair.target.pool[:] = 0
            for at in range(0, _ROWS * 5000, 5000):
                done = pair.write(pair.batch([at], [at], [5000]))
                assert done.outcome is Outcome.LANDED, done
            assert np.array_equal(pair.target.pool[: _ROWS * 5000], pair.writer.pool[: _ROWS * 5000])
            assert not np.asarray(pair.target.pool[_ROWS * 5000 :]).any()
            assert pair.attach().outcome is Outcome.LANDED


def _use(how: str, pair: Pair) -> None:
    """What the child does; what it is refused does not matter."""
    calls: dict[str, list[Callable[[], object]]] = {
        "polls": [lambda: pair.writer.engine.poll(0.01), lambda: pair.target.engine.poll(0.01)],
        "writes": [lambda: pair.submit(pair.batch([9], [9], [9])), lambda: pair.writer.engine.poll(0.05)],
        "attaches": [lambda: pair.settle(pair.writer.engine.attach(pair.target.me, pair.target.engine.describe()), 1)],
        "detaches": [
            lambda: pair.writer.engine.detach(pair.target.me),
            lambda: pair.target.engine.detach(pair.writer.me),
        ],
        "closes": [pair.writer.engine.close, pair.target.engine.close],
    }
    for call in calls.get(how, []):
        with contextlib.suppress(Exception):
            call()


def _in_a_child(work: Callable[[], None]) -> None:
    """Run it in a fork, which is killed if it has not ended within 5 s."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python warns of forks beside threads; that is the case here
        pid = os.fork()
    if not pid:
        try:
            signal.alarm(_CHILD_S)
            work()
        finally:
            os._exit(0)
    until = time.monotonic() + _CHILD_S + 1
    while time.monotonic() < until and os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
