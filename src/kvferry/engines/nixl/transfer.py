"""Transfers: begun, looked at until they are over, and freed."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

Handle = Any
"""A transfer, as the library knows it."""


class Transfer(Protocol):
    """A part of a ticket."""

    def begin(self) -> bool:
        """Begin; says whether it is over already; raises if it failed."""

    def is_over(self) -> bool:
        """Whether it is over; raises if it failed."""

    def free(self) -> None:
        """Free it, after it is over, has failed or was never begun, or its peer was forgotten."""


class Poster(Protocol):
    """What a transfer asks of its agent."""

    def post(self, handle: Handle) -> bool:
        """Begin; says whether it is over; raises if it failed."""

    def is_done(self, handle: Handle) -> bool:
        """Whether it is over; raises if it failed."""

    def release(self, handle: Handle) -> None:
        """Free it."""


class Here:
    """A transfer that is begun by whoever calls."""

    def __init__(self, agent: Poster, handle: Handle) -> None:
        self._agent = agent
        self._handle = handle

    def begin(self) -> bool:
        """Begin it: with cross-memory attach all of it is copied inside."""
        return self._agent.post(self._handle)

    def is_over(self) -> bool:
        """Whether it is over."""
        return self._agent.is_done(self._handle)

    def free(self) -> None:
        """Free it."""
        self._agent.release(self._handle)


GO_ON_S = 0.01
"""So long a thread goes on with a transfer that was not over when it was begun: the library copies some of it then."""

One = TypeVar("One")
"""What transfers are made with, by one thread at a time."""


class Aside(Generic[One]):
    """A transfer that another thread makes, begins and, if it is over then, frees."""

    def __init__(
        self,
        submit: Callable[[Callable[[], bool]], Future[bool]],
        free: queue.SimpleQueue[One],
        make: Callable[[One], Transfer],
        ring: Callable[[], None],
    ) -> None:
        """Prepare it.

        Args:
            submit: has something done by one of the threads.
            free: what transfers are made with: one for each thread.
            make: makes it.
            ring: called when it was begun.
        """
        self._submit = submit
        self._free = free
        self._make = make
        self._ring = ring
        self._made: Transfer | None = None
        self._begun: Future[bool] = Future()

    def begin(self) -> bool:
        """Have it begun."""
        self._begun = self._submit(self._go)
        self._begun.add_done_callback(lambda _: self._ring())
        return False

    def is_over(self) -> bool:
        """Whether it is over; raises what making it and beginning it have raised."""
        return self._begun.done() and (self._begun.result() or (self._made is not None and self._made.is_over()))

    def free(self) -> None:
        """Free what the thread has left."""
        made, self._made = self._made, None
        if made is not None:
            made.free()

    def _go(self) -> bool:
        one = self._free.get()
        try:
            self._made = self._make(one)
            is_over = self._made.begin()
            until = time.monotonic() + GO_ON_S
            while not is_over and time.monotonic() < until:
                is_over = self._made.is_over()
            if is_over:
                self.free()
        finally:
            self._free.put(one)
        return is_over
