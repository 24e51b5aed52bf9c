"""A turn: a lock that is taken without waiting, and that can't be lost.

A signal handler of the application may raise in a scheduler's thread at any place, also between the taking and a `try`
that would give it back (KeyboardInterrupt, time-outs by SIGALRM). The thread that owns the work by right looks, when it
waits long, whether anybody is still inside.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

log = logging.getLogger("kvferry.node")

PATIENCE_S = 1.0


class Turn:
    """One owner at a time."""

    def __init__(self, *users: Callable[..., Any]) -> None:
        """Name the functions inside of which others than the thread by right may hold it."""
        self._lock = threading.Lock()
        self._codes: set[CodeType] = {user.__code__ for user in users}

    @property
    def is_taken(self) -> bool:
        """Whether somebody has it."""
        return self._lock.locked()

    def try_take(self) -> bool:
        """Take it if it is free; never waits."""
        return self._lock.acquire(blocking=False)

    def take(self) -> None:
        """Wait for it; for the thread by right."""
        while not self._lock.acquire(timeout=PATIENCE_S):
            if self._is_abandoned():
                log.warning("a turn was abandoned: an exception of a signal handler went through a call of kvferry")
                return  # nobody can take it meanwhile: it is this thread's now

    def give_back(self) -> None:
        """End it."""
        self._lock.release()

    def _is_abandoned(self) -> bool:
        frames = sys._current_frames()
        return self._lock.locked() and not any(self._is_inside(frame) for frame in frames.values())

    def _is_inside(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self._codes:
                return True
            frame = frame.f_back
        return False
