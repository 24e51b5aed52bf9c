"""An engine that misbehaves on command, around any real one: for tests of kvferry and of its users.

find.register("faulty", "kvferry.testing.faulty:FaultyEmbedded")
manager.node.engine.hold()          # batches are taken but not written
manager.node.engine.release()       # now they are
manager.node.engine.fail_unknown()  # the next one fails, and its bytes land with release()
manager.node.engine.flip_byte()     # the next one lands with one wrong byte

Around another engine: `class MyFaulty(Faulty): def __init__(self): super().__init__(MyEngine())`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvferry.engines.local import LocalEngine
from kvferry.engines.seam import Batch, Caps, Done, Engine, EngineConfig, Limits, Outcome, Region, Ticket
from kvferry.ids import PeerId


class _Held(NamedTuple):
    """A batch that was taken and is not written yet."""

    ticket: Ticket
    due_s: float
    peer: PeerId
    batch: Batch
    has_failed: bool


class Faulty:
    """Wraps an engine. Commands may be given from any thread and act on batches submitted after them.

    What goes beyond the seam's nine calls (`explain`, `tryout`, ...) is the wrapped engine's.

    Attributes:
        delay_s: how long each batch waits before it is written.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.name = inner.name
        self.delay_s = 0.0
        self._lock = threading.Lock()
        self._holding = False
        self._alterations: deque[Callable[[Batch], Batch | None]] = deque()
        self._regions: list[Region] = []
        self._failures: deque[tuple[Outcome, str]] = deque()
        self._numbers = itertools.count(1)
        self._waiting: list[_Held] = []
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

    def fail_quiet(self, cause: str = "broken on purpose", count: int = 1) -> None:
        """Let the next batches end FAILED_QUIET; none of their bytes is written."""
        self.fail(Outcome.FAILED_QUIET, cause, count)

    def fail_unknown(self, cause: str = "broken on purpose", count: int = 1) -> None:
        """Let the next batches end FAILED_UNKNOWN; they are held, their bytes land with `release`, QUIET follows."""
        self.fail(Outcome.FAILED_UNKNOWN, cause, count)

    def delay(self, seconds: float) -> None:
        """Let each batch wait so long before it is written; 0 ends it."""
        self.delay_s = seconds

    def mix_up(self, count: int = 1) -> None:
        """Let the next batches land with right lengths and wrong bytes: two parts of the first row exchanged."""
        with self._lock:
            self._alterations.extend([_mixed_up] * count)

    def flip_byte(self, count: int = 1) -> None:
        """Let the next batches land with one wrong byte, and be called LANDED.

        The last byte of the first row that has another value somewhere in the registered memory is taken from there;
        so the source stays as it is. A batch in which no byte can be replaced like that, because it is empty, or has as
        many rows as the engine takes, is written as it is, and the next one is altered. Of device memory the byte
        before it is taken, unread.
        """
        with self._lock:
            self._alterations.extend([self._with_a_wrong_byte] * count)

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
        self._regions = list(regions)

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
            batch = self._altered(batch)
            self._waiting.append(_Held(ticket, time.monotonic() + self.delay_s, peer, batch, failure is not None))
        return ticket

    def poll(self, budget_s: float) -> list[Done]:
        """Write what is due and collect outcomes; what is due within the budget is written when it is."""
        self._write_due()
        for done in self.inner.poll(self._wait_s(budget_s)):
            self._take(done)
        self._write_due()
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

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def info(self) -> dict[str, Any]:
        """What the wrapped engine says of itself, if it says anything, and how much is held."""
        describe = getattr(self.inner, "info", dict)
        return {**describe(), "held": self.held}

    # -- helpers

    def _map(self, inner: Ticket, *, silent: bool, outer: Ticket | None = None) -> Ticket:
        outer = next(self._numbers) if outer is None else outer
        self._outer[inner] = (outer, silent)
        return outer

    def _altered(self, batch: Batch) -> Batch:
        """What the next alteration makes of a batch; it waits for another one if this one can't be altered."""
        if not self._alterations:
            return batch
        room = self.limits.rows - len(batch)
        altered = self._alterations[0](batch) if len(batch) and room > 1 else None
        if altered is None:
            return batch
        self._alterations.popleft()
        return altered

    def _wait_s(self, budget_s: float) -> float:
        with self._lock:
            if self._done:
                return 0.0
            due = [] if self._holding else [held.due_s for held in self._waiting]
        return max(0.0, min(budget_s, min(due, default=float("inf")) - time.monotonic()))

    def _write_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [] if self._holding else [held for held in self._waiting if held.due_s <= now]
            self._waiting = [held for held in self._waiting if held not in due]
        for held in due:
            self._map(self.inner.submit(held.peer, held.batch), silent=held.has_failed, outer=held.ticket)

    def _take(self, done: Done) -> None:
        outer, silent = self._outer.pop(done.ticket)
        if done.outcome is Outcome.FAILED_UNKNOWN:
            self._outer[done.ticket] = (outer, silent)
            if silent:  # that is what was said of it already
                return
        outcome = Outcome.QUIET if silent else done.outcome
        self._done.append(Done(outer, outcome, done.cause, done.native))

    def _with_a_wrong_byte(self, batch: Batch) -> Batch | None:
        for row in range(len(batch)):
            last = int(batch.src[row]) + int(batch.nbytes[row]) - 1
            other = self._another_value(last)
            if other is not None:
                return _replaced_last(batch, row, other)
        return None

    def _another_value(self, address: int) -> int | None:
        """Where in registered memory a byte lies that differs from the one at this address."""
        for region in self._regions:
            if not region.address <= address < region.address + region.nbytes:
                continue
            if region.device >= 0:
                return address - 1 if address > region.address else None
            memory = np.frombuffer(memoryview((ctypes.c_uint8 * region.nbytes).from_address(region.address)), np.uint8)
            differing = memory != memory[address - region.address]
            return region.address + int(differing.argmax()) if differing.any() else None
        return None


class FaultyEmbedded(Faulty):
    """A faulty local engine, as an engine of its own."""

    def __init__(self) -> None:
        super().__init__(LocalEngine())


def _mixed_up(batch: Batch) -> Batch | None:
    """The first row in two parts, each with the other's source."""
    half = int(batch.nbytes[0]) // 2
    if not half:
        return None
    moved = np.array([half, 0], np.uint64)
    rest = slice(1, None)
    src = np.concatenate([batch.src[:1] + moved, batch.src[rest]])
    dst = np.concatenate([batch.dst[:1] + moved[::-1], batch.dst[rest]])
    lengths = np.array([half, half], np.uint64)
    nbytes = np.concatenate([lengths, batch.nbytes[rest]])
    return msgspec.structs.replace(batch, src=src, dst=dst, nbytes=nbytes, total_bytes=int(nbytes.sum()))


def _replaced_last(batch: Batch, row: int, address: int) -> Batch:
    """A row's last byte as a row of its own, from another address."""
    kept = int(batch.nbytes[row]) - 1
    src = np.append(batch.src, np.uint64(address))
    dst = np.append(batch.dst, batch.dst[row] + np.uint64(kept))
    nbytes = np.append(batch.nbytes, np.uint64(1))
    nbytes[row] = kept
    full = nbytes > 0
    return msgspec.structs.replace(batch, src=src[full], dst=dst[full], nbytes=nbytes[full])
