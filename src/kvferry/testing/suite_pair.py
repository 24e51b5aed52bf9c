"""Two opened engines in one process, with pools and grants: the writer and the target of the engine suite."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.engines.grants import GrantTable
from kvferry.engines.seam import Batch, Caps, Done, Engine, EngineConfig, Outcome, Ticket
from kvferry.errors import EngineUnavailable
from kvferry.ids import PeerId
from kvferry.testing.settings import PATIENCE
from kvferry.testing.suite_memory import PLAIN, address_of, device_of, kind_of, new_pool, region_of

CLAIM = 7
GUARD = 0xEE
SETTLE_S = 30.0 * PATIENCE
"""How long an outcome may take that has to come; foreign engines need seconds to connect."""


class HostMemoryOnly(EngineUnavailable):
    """Pools are to lie on a device, and the engine has no DEVICE_MEMORY."""


@dataclass
class End:
    """One engine with the memory it may use.

    Attributes:
        engine: opened.
        me: its identity.
        pool: uint8[nbytes], registered.
        grants: what may be written to the pool.
        ended: outcomes that nobody has taken yet.
    """

    engine: Engine
    me: PeerId
    pool: npt.NDArray[np.uint8]
    grants: GrantTable
    ended: dict[Ticket, list[Done]] = field(default_factory=dict)
    _last: dict[Ticket, Outcome] = field(default_factory=dict)

    @property
    def address(self) -> int:
        """Where the pool lies."""
        return address_of(self.pool)

    def grant(self, peer: PeerId, claim: int = CLAIM) -> None:
        """Let a peer write to the whole pool."""
        self.grants.add(peer, claim, [self.address], [self.address + self.pool.nbytes])

    def poll(self, budget_s: float = 0.0) -> list[Done]:
        """Poll once, and keep the outcomes for whoever waits for them.

        A ticket ends once; only after FAILED_UNKNOWN a QUIET may follow. That is looked at here, in every test.
        """
        found = self.engine.poll(budget_s)
        for done in found:
            before = self._last.get(done.ticket)
            follows = done.outcome is Outcome.QUIET
            assert (before is Outcome.FAILED_UNKNOWN) if follows else (before is None), f"{done} came after {before}"
            self._last[done.ticket] = done.outcome
            self.ended.setdefault(done.ticket, []).append(done)
        return found

    def take(self, ticket: Ticket) -> Done | None:
        """The oldest outcome of a ticket that nobody has taken."""
        kept = self.ended.get(ticket)
        if not kept:
            return None
        if len(kept) == 1:
            del self.ended[ticket]
        return kept.pop(0)

    def wait(self, ticket: Ticket, limit_s: float = SETTLE_S, meanwhile: Callable[[], object] | None = None) -> Done:
        """Poll until a ticket has an outcome.

        Raises:
            TimeoutError: it has none within limit_s seconds.
        """
        until = time.monotonic() + limit_s
        while ticket not in self.ended:
            if time.monotonic() > until:
                raise TimeoutError(f"ticket {ticket} of {self.engine.name} has not ended within {limit_s} s")
            if meanwhile is not None:
                meanwhile()
            self.poll(0.001)
        done = self.take(ticket)
        assert done is not None
        return done


def open_end(engine: Engine, incarnation: int, nbytes: int, options: dict[str, str], memory: str = PLAIN) -> End:
    """Open an engine with a pool of nbytes guard bytes, from where `memory` says.

    Raises:
        EngineUnavailable: the engine, or such memory, is not there.
        HostMemoryOnly: the memory is a device's and the engine has no DEVICE_MEMORY.
    """
    return open_over(engine, incarnation, new_pool(memory, nbytes), options, memory)


def open_over(
    engine: Engine, incarnation: int, pool: npt.NDArray[np.uint8], options: dict[str, str], memory: str = PLAIN
) -> End:
    """Open an engine with a pool that is there already; it is filled with guard bytes."""
    pool[:] = GUARD
    end = End(engine, PeerId(incarnation), pool, GrantTable())
    engine.open(EngineConfig(end.me, end.grants, options=options))
    if device_of(pool) >= 0 and Caps.DEVICE_MEMORY not in engine.caps:
        engine.close()
        raise HostMemoryOnly(f"engine {engine.name!r} has no DEVICE_MEMORY: {kind_of(memory)} memory is not for it")
    engine.register([region_of(pool)])
    return end


@dataclass
class Pair:
    """A writer and a target; `settle` polls both, as engines may need."""

    writer: End
    target: End

    @property
    def ended(self) -> dict[Ticket, list[Done]]:
        """The writer's outcomes that nobody has taken."""
        return self.writer.ended

    def attach(self) -> Done:
        """Attach the writer to the target, with a grant for the whole pool."""
        self.target.grant(self.writer.me)
        return self.settle(self.writer.engine.attach(self.target.me, self.target.engine.describe()))

    def write(self, batch: Batch) -> Done:
        """Submit a batch and wait for its first outcome."""
        return self.settle(self.submit(batch))

    def submit(self, batch: Batch) -> Ticket:
        """Submit a batch to the target."""
        return self.writer.engine.submit(self.target.me, batch)

    def batch(self, src: npt.ArrayLike, dst: npt.ArrayLike, nbytes: npt.ArrayLike, claim: int = CLAIM) -> Batch:
        """A batch from offsets in the writer's pool to offsets in the target's, in bytes."""
        return batch_between(self.writer, self.target.address, src, dst, nbytes, claim)

    def settle(self, ticket: Ticket, limit_s: float = SETTLE_S) -> Done:
        """Poll both engines until a ticket of the writer has ended; TimeoutError after limit_s seconds."""
        return self.writer.wait(ticket, limit_s, self.target.poll)

    def step(self) -> list[Done]:
        """Poll both once; returns the writer's outcomes, which `settle` sees, too."""
        self.target.poll(0)
        return self.writer.poll(0.001)

    def close(self) -> None:
        """Close both."""
        self.writer.engine.close()
        self.target.engine.close()


def batch_between(
    writer: End, address: int, src: npt.ArrayLike, dst: npt.ArrayLike, nbytes: npt.ArrayLike, claim: int = CLAIM
) -> Batch:
    """A batch from offsets in a writer's pool to offsets from an address in a peer, in bytes."""
    lengths = np.asarray(nbytes, np.uint64)
    here = np.asarray(src, np.uint64) + np.uint64(writer.address)
    there = np.asarray(dst, np.uint64) + np.uint64(address)
    return Batch(here, there, lengths, int(lengths.sum()), claim)


def wait_for(engine: Engine, ticket: Ticket, limit_s: float) -> Outcome | None:
    """Poll one engine until a ticket has ended; None when it has not within limit_s."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        for done in engine.poll(0.01):
            if done.ticket == ticket:
                return done.outcome
    return None
