"""Waiting for one of a node's threads, which may have died."""

from __future__ import annotations

import threading
import time

from kvferry.errors import EngineError

LOOK_S = 0.5
"""How often it is looked whether the thread is there."""


def wait_for(done: threading.Event, thread: threading.Thread, who: str, limit_s: float) -> None:
    """Wait until a thread has done what it was asked for.

    Args:
        done: set by the thread.
        thread: whose end ends the wait.
        who: what texts call it.
        limit_s: how long to wait.

    Raises:
        EngineError: the thread has ended, or did not answer in time.
    """
    until = time.monotonic() + limit_s
    while not done.wait(min(LOOK_S, limit_s)):
        if not thread.is_alive() and not done.is_set():
            raise EngineError(f"{who} has ended", hint="see health()")
        if time.monotonic() > until:
            raise EngineError(f"{who} did not answer within {limit_s:g} s", hint="see health()")
