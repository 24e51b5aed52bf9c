"""One attached peer: the first mechanism that works, and the reasons against the earlier ones kept for people."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

from kvferry.engines.local.link import Link, State
from kvferry.engines.local.syscalls import error_name
from kvferry.engines.seam import Batch, Done, Outcome, Ticket
from kvferry.ids import PeerId

Tries = list[tuple[str, Callable[[], Link]]]
"""Mechanisms in the order in which they are tried: name, and what begins it."""

OPENING_S = 5.0
"""How long one mechanism may take to answer before the next is tried."""


class Attachment:
    """Tries mechanisms in order until one is ready, then hands batches to it.

    Attributes:
        peer: whom it is attached to.
        link: the link in use or being tried; None when all have failed before a descriptor was made.
        done: outcomes that wait to be collected, the attach ticket's among them.
    """

    def __init__(self, peer: PeerId, ticket: Ticket, tries: Tries, selector: selectors.BaseSelector) -> None:
        self.peer = peer
        self.done: list[Done] = []
        self.link: Link | None = None
        self._ticket = ticket
        self._tries = tries
        self._selector = selector
        self._reasons: list[str] = []
        self._noted: Link | None = None
        self._until_s = 0.0
        self._watched_fd = -1
        self._next()

    @property
    def state(self) -> State:
        """OPENING until a mechanism is ready or none is left."""
        return self.link.state if self.link is not None else State.LOST

    def connected_by(self, mechanism: str) -> bool:
        """Whether it is ready, and by this mechanism."""
        return self.link is not None and self.link.state is State.READY and self.link.mechanism == mechanism

    def explain(self) -> str:
        """Which mechanism is used, and why not another, in words."""
        used = f"{self.link.mechanism} ({self.link.state.value})" if self.link is not None else "not attached"
        return "; ".join([used, *self._reasons])

    def step(self) -> None:
        """Go on without waiting; falls back to the next mechanism when one fails or does not answer."""
        link = self.link
        if link is None:
            return
        was_opening = link.state is State.OPENING
        link.step()
        if was_opening:
            self._opened(link)
        self._collect()

    def submit(self, ticket: Ticket, batch: Batch) -> None:
        """Hand over a batch that was checked; refused unless READY."""
        link = self.link
        if link is None or self.state is not State.READY:
            self.done.append(
                Done(ticket, Outcome.FAILED_QUIET, f"the peer is not attached: {self.explain()}", "not attached")
            )
            return
        link.submit(ticket, batch)
        self._collect()

    def close(self) -> None:
        """End the attachment; open tickets end, an attach that is under way fails."""
        if self.state is State.OPENING:
            self.done.append(Done(self._ticket, Outcome.FAILED_QUIET, "detached before the peer answered", "detached"))
        self._unwatch()
        if self.link is not None:
            self.link.close()
        self._tries.clear()
        self._collect()

    def _next(self) -> None:
        while self._tries:
            mechanism, begin = self._tries.pop(0)
            try:
                self.link = begin()
            except OSError as error:  # no descriptor is left, for instance
                self.link = None
                self._reasons.append(f"{mechanism}: it can't begin: {error_name(error)} ({error.strerror})")
                continue
            self._until_s = time.monotonic() + OPENING_S
            if self.link.state is State.LOST:
                self._note(self.link, self.link.why)
                continue
            self._watch()
            return
        self.done.append(
            Done(self._ticket, Outcome.FAILED_QUIET, f"can't attach: {'; '.join(self._reasons)}", "not attached")
        )

    def _opened(self, link: Link) -> None:
        if link.state is State.READY:
            self.done.append(Done(self._ticket, Outcome.LANDED))
            return
        why = link.why
        if link.state is State.OPENING:
            if time.monotonic() < self._until_s:
                return
            why = f"no answer within {OPENING_S:.0f} s"
        self._unwatch()
        link.close()
        self._note(link, why)
        self._next()

    def _note(self, link: Link, why: str) -> None:
        self._noted = link
        self._reasons.append(f"{link.mechanism}: {why}")

    def _collect(self) -> None:
        if self.link is not None:
            if self.link.state is State.LOST and self.link is not self._noted:
                self._note(self.link, self.link.why)
            self.done += self.link.done
            self.link.done.clear()
        self._watch()

    def _watch(self) -> None:
        fd = self.link.fileno() if self.link is not None else -1
        if fd != self._watched_fd:
            self._unwatch()
        if fd < 0 or self.link is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.link.wants_write() else 0)
        if self._watched_fd < 0:
            self._selector.register(fd, events, self)
        elif self._selector.get_key(fd).events != events:
            self._selector.modify(fd, events, self)
        self._watched_fd = fd

    def _unwatch(self) -> None:
        if self._watched_fd >= 0:
            self._selector.unregister(self._watched_fd)
        self._watched_fd = -1
