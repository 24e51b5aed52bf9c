"""Two opened engines in one process, with pools and grants: the writer and the target of the engine suite."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.engines.grants import GrantTable
from kvferry.engines.seam import Batch, Done, Engine, EngineConfig, Outcome, Region, Ticket
from kvferry.ids import PeerId
from kvferry.testing.suite_memory import PLAIN, new_pool

CLAIM = 7
GUARD = 0xEE


@dataclass
class End:
    """One engine with the memory it may use.

    Attributes:
        engine: opened.
        me: its identity.
        pool: uint8[nbytes], registered.
        grants: what may be written to the pool.
    """

    engine: Engine
    me: PeerId
    pool: npt.NDArray[np.uint8]
    grants: GrantTable

    @property
    def address(self) -> int:
        """Where the pool lies."""
        return int(self.pool.ctypes.data)

    def grant(self, peer: PeerId, claim: int = CLAIM) -> None:
        """Let a peer write to the whole pool."""
        self.grants.add(peer, claim, [self.address], [self.address + self.pool.nbytes])


def open_end(engine: Engine, incarnation: int, nbytes: int, options: dict[str, str], memory: str = PLAIN) -> End:
    """Open an engine with a pool of nbytes guard bytes, from where `memory` says."""
    pool = new_pool(memory, nbytes)
    pool[:] = GUARD
    end = End(engine, PeerId(incarnation), pool, GrantTable())
    engine.open(EngineConfig(end.me, end.grants, options=options))
    engine.register([Region(end.address, nbytes)])
    return end


@dataclass
class Pair:
    """A writer and a target; `settle` polls both, as engines may need."""

    writer: End
    target: End
    ended: dict[Ticket, list[Done]] = field(default_factory=dict)

    def attach(self) -> Done:
        """Attach the writer to the target, with a grant for the whole pool."""
        self.target.grant(self.writer.me)
        return self.settle(self.writer.engine.attach(self.target.me, self.target.engine.describe()))

    def write(self, batch: Batch) -> Done:
        """Submit a batch and wait for its first outcome."""
        return self.settle(self.writer.engine.submit(self.target.me, batch))

    def batch(self, src: npt.ArrayLike, dst: npt.ArrayLike, nbytes: npt.ArrayLike, claim: int = CLAIM) -> Batch:
        """A batch from offsets in the writer's pool to offsets in the target's, in bytes."""
        lengths = np.asarray(nbytes, np.uint64)
        here = np.asarray(src, np.uint64) + np.uint64(self.writer.address)
        there = np.asarray(dst, np.uint64) + np.uint64(self.target.address)
        return Batch(here, there, lengths, int(lengths.sum()), claim)

    def settle(self, ticket: Ticket, limit_s: float = 10.0) -> Done:
        """Poll both engines until a ticket of the writer has ended."""
        until = time.monotonic() + limit_s
        while ticket not in self.ended:
            if time.monotonic() > until:
                raise TimeoutError(f"ticket {ticket} has not ended within {limit_s} s")
            self.step()
        return self.ended[ticket].pop(0) if len(self.ended[ticket]) > 1 else self.ended.pop(ticket)[0]

    def step(self) -> list[Done]:
        """Poll both once; returns the writer's outcomes, which `settle` sees, too."""
        self.target.engine.poll(0)
        found = self.writer.engine.poll(0.001)
        for done in found:
            self.ended.setdefault(done.ticket, []).append(done)
        return found

    def close(self) -> None:
        """Close both."""
        self.writer.engine.close()
        self.target.engine.close()


def wait_for(engine: Engine, ticket: Ticket, limit_s: float) -> Outcome | None:
    """Poll one engine until a ticket has ended; None when it has not within limit_s."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        for done in engine.poll(0.01):
            if done.ticket == ticket:
                return done.outcome
    return None
