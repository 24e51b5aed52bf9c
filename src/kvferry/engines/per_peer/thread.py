"""What writes to one peer: a thread, since the library's calls wait for the other process."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.engines.seam import Batch, Done, Outcome, Ticket
from kvferry.ids import PeerId

log = logging.getLogger("kvferry.engines")

Said = TypeVar("Said")
"""An engine's blob, decoded."""


@dataclass
class Attaching(Generic[Said]):
    """A request to connect.

    Attributes:
        ticket: its ticket.
        blob: what the peer said.
        until: when nobody waits for it any more, on the monotonic clock.
    """

    ticket: Ticket
    blob: Said
    until: float


@dataclass
class Writing:
    """A batch that was checked on this side."""

    ticket: Ticket
    batch: Batch


class PeerThread(ABC, Generic[Said]):
    """Does one thing at a time for one peer; what becomes of it is reported from the thread.

    Attributes:
        rebuilds: how many instances of the library were given up after a failure.
        events: what the library has said of this peer, in words.
        left: it is to begin nothing more.
    """

    def __init__(self, engine: str, name: PeerId, report: Callable[[Done], None]) -> None:
        """Prepare it; `start` starts it.

        Args:
            engine: the engine's name.
            name: of the peer.
            report: is told how tickets end.
        """
        self.name = name
        self.rebuilds = 0
        self.events: list[str] = []
        self.left = False
        self._engine = engine
        self._report = report
        self._inbox: queue.SimpleQueue[Attaching[Said] | Writing | None] = queue.SimpleQueue()
        self._kept: deque[Attaching[Said] | Writing | None] = deque()  # taken out, and comes next
        self._thread = threading.Thread(target=self._main, name=f"kvferry-{engine}-{name}", daemon=True)

    @property
    @abstractmethod
    def where(self) -> str:
        """For people: where the attached peer is written to; "not attached"."""

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, work: Attaching[Said] | Writing) -> None:
        """Have it done after what was posted before."""
        self._inbox.put(work)

    def leave(self) -> None:
        """Begin nothing more; the thread ends when the library's call that is on has returned."""
        self.left = True
        self._inbox.put(None)

    def relieve(self) -> None:
        """Leave what it still looks after to whoever comes after."""

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)

    # -- what is the library's own; all on the thread

    @abstractmethod
    def _attach(self, work: Attaching[Said]) -> None:
        """Connect, and report."""

    @abstractmethod
    def _write(self, works: Sequence[Writing]) -> None:
        """Write batches, and report each."""

    @abstractmethod
    def _broke(self, works: Sequence[Attaching[Said] | Writing], cause: str, native: str) -> None:
        """The library raised: give its instance up, and report."""

    @abstractmethod
    def _drop(self) -> None:
        """End the instance, if there is one."""

    def _begin(self) -> None:
        """Before all else."""

    def _end(self) -> None:
        """After all else."""

    def _idle_s(self) -> float | None:
        """After how many seconds without work `_idle` is called; None: never."""
        return None

    def _idle(self) -> None:
        """Nothing was posted for that long."""

    def _goes_with(self, works: Sequence[Writing], following: Writing) -> bool:  # noqa: ARG002 - one by one
        """Whether a batch may be in flight at once with these."""
        return False

    # -- the thread

    def _main(self) -> None:
        self._begin()
        while (works := self._take()) is not None:
            try:
                self._attach(works) if isinstance(works, Attaching) else self._write(works)
            except Exception as error:
                log.exception("the %s engine failed with peer %s", self._engine, self.name)
                given = [works] if isinstance(works, Attaching) else works
                self._give_in(given, error)
        try:
            self._drop()
        finally:
            self._end()

    def _give_in(self, given: Sequence[Attaching[Said] | Writing], error: Exception) -> None:
        cause, native = f"the library raised {error!r}", type(error).__name__
        try:
            self._broke(given, cause, native)
        except Exception:
            log.exception("the %s engine could not give up what it had begun with peer %s", self._engine, self.name)
            self._tell(given, Outcome.FAILED_UNKNOWN, cause, native)

    def _take(self) -> Attaching[Said] | list[Writing] | None:
        """What comes next, batches that may go together at once: between two calls connections are idle."""
        first = self._kept.popleft() if self._kept else self._next()
        if not isinstance(first, Writing):
            return first
        found = [first]
        with contextlib.suppress(queue.Empty):
            while isinstance(following := self._inbox.get_nowait(), Writing) and self._goes_with(found, following):
                found.append(following)
            self._kept.append(following)
        return found

    def _next(self) -> Attaching[Said] | Writing | None:
        while True:
            try:
                return self._inbox.get(timeout=self._idle_s())
            except queue.Empty:
                self._idle_or_drop()

    def _idle_or_drop(self) -> None:
        try:
            self._idle()
        except Exception:
            log.exception("the %s engine failed with peer %s while it was idle", self._engine, self.name)
            self._drop()

    def _tell(
        self, works: Sequence[Attaching[Said] | Writing], outcome: Outcome, cause: str = "", native: str = ""
    ) -> None:
        for work in works:
            self._report(Done(work.ticket, outcome, cause, native))
