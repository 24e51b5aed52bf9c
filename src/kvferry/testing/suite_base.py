"""What the groups of the engine suite share: the pair of engines, other processes, and ways to look at them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.engines import find
from kvferry.engines.seam import Batch, Caps, Done, Engine, Outcome, Ticket
from kvferry.errors import EngineUnavailable
from kvferry.testing import settings
from kvferry.testing.faulty import Faulty
from kvferry.testing.suite_memory import PLAIN, kind_of, refusal_of
from kvferry.testing.suite_pair import CLAIM, GUARD, SETTLE_S, End, HostMemoryOnly, Pair, batch_between, open_end
from kvferry.testing.suite_process import EngineProcess

POOL_BYTES = 8 << 20
FLOOD_BYTES = 4 << 20
FAILED = (Outcome.FAILED_QUIET, Outcome.FAILED_UNKNOWN)


@functools.cache
def _random_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(5).integers(0, 256, nbytes, np.uint8)


class SuiteBase:
    """A pytest base class; subclasses set the names, or override how an engine is made.

    Attributes:
        engine_name: what `find.load` and the second process load.
        options: what it is opened with.
        memory: "module:function" that gives a pool of so many bytes as a numpy array, in both processes.
        label: what the matrix calls it; by default the name, the options and the memory.
        cycles: attach-and-detach cycles of the leak test.
        examples: histories that the state machine tries.
        group: the group of the tests that a class defines.
    """

    engine_name = "local"
    options: ClassVar[dict[str, str]] = {}
    memory = PLAIN
    label = ""
    cycles = 200
    examples = 40
    group: ClassVar[str] = ""

    def make_engine(self) -> Engine:
        """A new engine, not opened."""
        return find.load(self.engine_name)

    def make_pair(self) -> Pair:
        """A writer and a target in this process, not attached."""
        return self.pair_of(self.make_end(1), self.make_end(2))

    def make_end(self, incarnation: int, nbytes: int = POOL_BYTES, engine: Engine | None = None) -> End:
        """One opened engine with a pool of guard bytes."""
        made = self.make_engine() if engine is None else engine
        return open_end(made, incarnation, nbytes, dict(self.options), self.provider())

    def pair_of(self, writer: End, target: End) -> Pair:
        """Fill the writer's pool with random bytes."""
        writer.pool[:] = _random_bytes(writer.pool.nbytes)
        return Pair(writer, target)

    def spawn(self, nbytes: int = FLOOD_BYTES, prefix: tuple[str, ...] = (), incarnation: int = 99) -> EngineProcess:
        """A second process with an opened engine and a pool of nbytes."""
        name = find.canonical(self.engine_name)
        known = find.known().get(name)
        engine = f"{name}={known.target}" if known is not None and known.origin == "registered" else name
        process = EngineProcess(engine, dict(self.options), incarnation, nbytes, prefix, self.provider())
        process.meanwhile = self._poll_target
        self._processes.append(process)
        return process

    def provider(self) -> str:
        """Where pools come from: the suite's own provider, or else the run's (--kvferry-memory)."""
        return settings.current.memory if settings.current.memory and self.memory == PLAIN else self.memory

    def target_writes(self) -> bool:
        """Whether the target itself writes all that arrives, so that it can stop it.

        An engine with GRANTS and BLOCKING decides from peer to peer; on one host it is taken to write directly.
        """
        return self.target_writes_of(self.pair.target.engine)

    def target_writes_of(self, engine: Engine) -> bool:
        """The same of an engine that is open."""
        return Caps.GRANTS in engine.caps and Caps.BLOCKING not in engine.caps

    @property
    def caps(self) -> Caps:
        """What the engine can do, opened with these options."""
        return self.pair.target.engine.caps

    @classmethod
    def name_in_matrix(cls) -> str:
        """The row of the matrix that this class fills."""
        options = [f"{key}={value}" for key, value in cls.options.items()]
        kind = [kind_of(cls.memory)] if cls.memory != PLAIN else []
        return cls.label or " ".join([cls.engine_name, *options, *kind])

    def setup_method(self) -> None:
        """Open the pair that most tests use; an engine that is not there skips, or fails where it is required."""
        self._processes: list[EngineProcess] = []
        self._ends: list[End] = []
        self.refusals: list[str] = []
        refusal = refusal_of(self.provider())
        if refusal:
            pytest.skip(refusal)
        try:
            self.pair = self.make_pair()
        except HostMemoryOnly as error:
            pytest.skip(str(error))
        except EngineUnavailable as error:
            if self.engine_name.casefold() in settings.current.required:
                pytest.fail(f"required, but not available: {error}", pytrace=False)
            pytest.skip(str(error))

    def teardown_method(self) -> None:
        """End processes and engines, and let go of the pools: pytest keeps a test's object until its run has ended."""
        for process in self._processes:
            process.kill()
        self._processes.clear()
        for end in self._ends:
            end.engine.close()
        if hasattr(self, "pair"):
            self.pair.close()
        for name in set(vars(self)) - {"refusals"}:
            delattr(self, name)

    # for the groups

    def refused(self, capability: Caps) -> None:
        """Note that what needs this capability was refused, as it has to be."""
        self.refusals.append(f"no {capability.name}")

    def needs(self, capability: Caps, why: str) -> None:
        """Skip a test that has nothing to show without a capability."""
        if capability not in self.caps:
            pytest.skip(f"no {capability.name}: {why}")

    def another_end(self, incarnation: int, nbytes: int = POOL_BYTES, engine: Engine | None = None) -> End:
        """One more engine, which is closed after the test."""
        end = self.make_end(incarnation, nbytes, engine)
        self._ends.append(end)
        return end

    def faulty_pair(self) -> tuple[Pair, Faulty]:
        """Replace the pair by one whose writer can hold batches back."""
        self.pair.close()
        faulty = Faulty(self.make_engine())
        self.pair = self.pair_of(self.make_end(1, engine=cast("Engine", faulty)), self.make_end(2))
        return self.pair, faulty

    def capped(self, rows: int) -> int:
        """So many rows, or as many as the engine takes at once."""
        return min(rows, self.pair.writer.engine.limits.rows)

    def scattered(self, rows: int) -> tuple[Batch, npt.NDArray[np.uint8]]:
        """A batch of odd-sized rows, shuffled on both sides, and what the target must hold afterwards."""
        random = np.random.default_rng(rows)
        slot = min(2000, POOL_BYTES // (rows + 1), self.pair.writer.engine.limits.bytes // max(rows, 1))
        nbytes = random.integers(1, slot + 1, rows)
        starts = np.arange(rows) * slot
        src, dst = random.permutation(starts), random.permutation(starts) + 3
        expected = self.pair.target.pool.copy()
        source = self.pair.writer.pool.copy()
        for here, there, length in zip(src, dst, nbytes, strict=True):
            expected[there : there + length] = source[here : here + length]
        return self.pair.batch(src, dst, nbytes), expected

    def assert_untouched(self) -> None:
        """The target's pool holds guard bytes only."""
        assert (self.pair.target.pool == GUARD).all()

    def assert_holds(self, expected: npt.NDArray[np.uint8]) -> None:
        """The target's pool is this, every byte of it."""
        differing = np.flatnonzero(np.asarray(self.pair.target.pool) != expected)
        assert not len(differing), f"{len(differing)} bytes differ, the first at {differing[0]}"

    def assert_still_for(self, seconds: float) -> None:
        """The target's pool does not change any more."""
        before = self.pair.target.pool.copy()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.pair.target.poll(0.01)
        self.assert_holds(before)

    def assert_fence_lands(self, ticket: Ticket) -> None:
        """A fence of the pair's target ends with its proof."""
        assert self.pair.target.wait(ticket, SETTLE_S / 3).outcome is Outcome.LANDED

    def settled_attach(self, process: EngineProcess) -> Done:
        """Attach the writer of the pair to a process."""
        return self.pair.settle(self.pair.writer.engine.attach(process.peer, process.blob))

    def write_to(self, process: EngineProcess) -> Done:
        """Write 50 bytes to the start of a process's pool."""
        return self.pair.settle(self.submit_to(process, [0], [0], [50]))

    def submit_to(
        self, process: EngineProcess, src: npt.ArrayLike, dst: npt.ArrayLike, nbytes: npt.ArrayLike
    ) -> Ticket:
        """Submit rows from the writer's pool to a process's."""
        writer = self.pair.writer
        return writer.engine.submit(process.peer, batch_between(writer, process.address, src, dst, nbytes))

    def spawn_target(self, nbytes: int = 1 << 20, incarnation: int = 99) -> EngineProcess:
        """A process that the pair's writer is attached to, and may write to."""
        process = self.spawn(nbytes, incarnation=incarnation)
        process.do("grant", peer=[self.pair.writer.me.incarnation, 0], claim=CLAIM)
        done = self.settled_attach(process)
        assert done.outcome is Outcome.LANDED, done
        return process

    def flooding(self) -> EngineProcess:
        """A process that has attached to the pair's target and writes to it without a pause."""
        target = self.pair.target
        process = self.spawn(min(FLOOD_BYTES, target.engine.limits.bytes))
        target.grant(process.peer)
        attached = process.attach(target.me, target.engine.describe())
        assert attached["outcome"] == Outcome.LANDED.value, attached
        process.flood(target.me, CLAIM, target.address)
        self.wait_until(lambda: bool(target.pool[0] != GUARD))
        assert target.pool[0] != GUARD
        return process

    def wait_until(self, condition: Callable[[], bool], limit_s: float = SETTLE_S / 3) -> None:
        """Poll the target until something holds, or limit_s seconds are over."""
        until = time.monotonic() + limit_s
        while not condition() and time.monotonic() < until:
            self.pair.target.poll(0.005)

    def settle_all(self, tickets: Sequence[Ticket], limit_s: float = SETTLE_S) -> list[Done]:
        """Wait for the first outcome of each of the writer's tickets."""
        return [self.pair.settle(ticket, limit_s) for ticket in tickets]

    def _poll_target(self) -> None:
        self.pair.target.poll(0)
