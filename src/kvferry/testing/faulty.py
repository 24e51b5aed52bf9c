"""An engine that misbehaves on command, around any real one: for tests of kvferry and of its users.

find.register("faulty", "kvferry.testing.faulty:FaultyEmbedded")
manager.node.engine.hold()      # batches are taken but not written
manager.node.engine.release()   # now they are
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvferry.engines.local import LocalEngine
from kvferry.engines.seam import Batch, Caps, Done, Engine, EngineConfig, Limits, Outcome, Region, Ticket
from kvferry.ids import PeerId


class Faulty:
    """Wraps an engine. Commands may be given from any thread and act on batches submitted after them.

    Attributes:
        delay_s: how long each batch waits before it is written.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.name = inner.name
        self.delay_s = 0.0
        self._lock = threading.Lock()
        self._holding = False
        self._mix_ups = 0
        self._failures: deque[tuple[Outcome, str]] = deque()
        self._numbers = itertools.count(1)
        self._waiting: list[tuple[Ticket, float, PeerId, Batch, bool]] = []
        self._outer: dict[Ticket, tuple[Ticket, bool]] = {}
        self._done: list[Done] = []

    # -- commands

    def hold(self) -> None:
        """Take batches, and write them only after `release`."""
        with self._lock:
            self._holding = True

    def release(self) -> None:
        """Write what was held, those that were reported as FAILED_UNKNOWN included."""
        with self._lock:
            self._holding = False

    def fail(self, outcome: Outcome = Outcome.FAILED_QUIET, cause: str = "broken on purpose", count: int = 1) -> None:
        """Let the next batches end so. After FAILED_UNKNOWN the bytes land with `release`, and QUIET follows."""
        with self._lock:
            self._failures.extend([(outcome, cause)] * count)
            self._holding = self._holding or outcome is Outcome.FAILED_UNKNOWN

    def mix_up(self, count: int = 1) -> None:
        """Let the next batches land with right lengths and wrong bytes: two parts of the first row exchanged."""
        with self._lock:
            self._mix_ups += count

    @property
    def held(self) -> int:
        """How many batches wait."""
        with self._lock:
            return len(self._waiting)

    # -- the seam

    @property
    def caps(self) -> Caps:
        """Those of the wrapped engine; nothing blocks here."""
        return self.inner.caps & ~Caps.BLOCKING

    @property
    def limits(self) -> Limits:
        """Those of the wrapped engine."""
        return self.inner.limits

    def open(self, config: EngineConfig) -> None:
        """Open the wrapped engine."""
        self.inner.open(config)

    def register(self, regions: Sequence[Region]) -> None:
        """Register with the wrapped engine."""
        self.inner.register(regions)

    def describe(self) -> bytes:
        """What the wrapped engine says."""
        return self.inner.describe()

    def personal(self, blob: bytes, epoch: int) -> bytes:
        """What the wrapped engine makes of it, if it makes anything."""
        seal = getattr(self.inner, "personal", None)
        sealed: bytes = blob if seal is None else seal(blob, epoch)
        return sealed

    def attach(self, peer: PeerId, blob: bytes) -> Ticket:
        """Attach the wrapped engine."""
        return self._map(self.inner.attach(peer, blob), silent=False)

    def submit(self, peer: PeerId, batch: Batch) -> Ticket:
        """Take a batch; it is written when it is due."""
        ticket = next(self._numbers)
        with self._lock:
            failure = self._failures.popleft() if self._failures else None
            if failure is not None:
                self._done.append(Done(ticket, *failure, native="EFAULTY"))
                if failure[0] is not Outcome.FAILED_UNKNOWN:
                    return ticket
            if self._mix_ups:
                self._mix_ups -= 1
                batch = _mixed_up(batch)
            self._waiting.append((ticket, time.monotonic() + self.delay_s, peer, batch, failure is not None))
        return ticket

    def poll(self, budget_s: float) -> list[Done]:
        """Write what is due and collect outcomes."""
        self._write_due()
        for done in self.inner.poll(0.0 if self._done else budget_s):
            self._take(done)
        with self._lock:
            found, self._done = self._done, []
        return found

    def fence(self, peer: PeerId, claim: int | None = None) -> Ticket:
        """Fence with the wrapped engine."""
        return self._map(self.inner.fence(peer, claim), silent=False)

    def detach(self, peer: PeerId) -> None:
        """Detach the wrapped engine; what is held for the peer still comes, as from hardware."""
        self.inner.detach(peer)

    def close(self) -> None:
        """Close the wrapped engine."""
        self.inner.close()

    def info(self) -> dict[str, Any]:
        """What the wrapped engine says of itself, if it says anything, and how much is held."""
        describe = getattr(self.inner, "info", dict)
        return {**describe(), "held": self.held}

    # -- helpers

    def _map(self, inner: Ticket, *, silent: bool, outer: Ticket | None = None) -> Ticket:
        outer = next(self._numbers) if outer is None else outer
        self._outer[inner] = (outer, silent)
        return outer

    def _write_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [] if self._holding else [entry for entry in self._waiting if entry[1] <= now]
            self._waiting = [entry for entry in self._waiting if entry not in due]
        for ticket, _, peer, batch, silent in due:
            self._map(self.inner.submit(peer, batch), silent=silent, outer=ticket)

    def _take(self, done: Done) -> None:
        outer, silent = self._outer.pop(done.ticket)
        if done.outcome is Outcome.FAILED_UNKNOWN:
            self._outer[done.ticket] = (outer, silent)
        outcome = Outcome.QUIET if silent else done.outcome
        self._done.append(Done(outer, outcome, done.cause, done.native))


class FaultyEmbedded(Faulty):
    """A faulty local engine, as an engine of its own."""

    def __init__(self) -> None:
        super().__init__(LocalEngine())


def _mixed_up(batch: Batch) -> Batch:
    """The first row in two parts, each with the other's source."""
    half = int(batch.nbytes[0]) // 2
    moved = np.array([half, 0], np.uint64)
    rest = slice(1, None)
    src = np.concatenate([batch.src[:1] + moved, batch.src[rest]])
    dst = np.concatenate([batch.dst[:1] + moved[::-1], batch.dst[rest]])
    lengths = np.array([half, half], np.uint64)
    nbytes = np.concatenate([lengths, batch.nbytes[rest]])
    return msgspec.structs.replace(batch, src=src, dst=dst, nbytes=nbytes, total_bytes=int(nbytes.sum()))
