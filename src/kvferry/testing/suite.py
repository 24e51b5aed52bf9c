"""The engine suite: what every engine has to show, by capability.

A back-end's test file is a few lines:

    class TestMyEngine(EngineSuite):
        engine_name = "mine"
        options = {"setting": "value"}
        memory = "kvferry.testing.suite_memory:memfd"  # if it needs memory of its own kind

Each row of the page on what proves quiet is shown here; what is not shown is not claimed.
"""

from __future__ import annotations

import os
import threading
import time
from typing import ClassVar

import numpy as np

from kvferry.engines import find
from kvferry.engines.seam import Batch, Caps, Done, Engine, Outcome
from kvferry.ids import PeerId
from kvferry.testing.suite_memory import PLAIN
from kvferry.testing.suite_pair import GUARD, End, Pair, open_end, wait_for
from kvferry.testing.suite_process import EngineProcess

POOL_BYTES = 8 << 20
FLOOD_BYTES = 4 << 20
ROW_COUNTS = (0, 1, 2, 3, 64, 1025, 4096)
_GARBAGE = (b"", b"\0" * 40, b"not a blob", b"\xff" * 200_000)


class EngineSuite:
    """A pytest base class; subclasses set the names, or override how an engine is made.

    Attributes:
        engine_name: what `find.load` and the second process load.
        options: what it is opened with.
        memory: "module:function" that gives a pool of so many bytes as a numpy array, in both processes.
        cycles: attach-and-detach cycles of the leak test.
    """

    engine_name = "local"
    options: ClassVar[dict[str, str]] = {}
    memory = PLAIN
    cycles = 50

    def make_engine(self) -> Engine:
        """A new engine, not opened."""
        return find.load(self.engine_name)

    def make_pair(self) -> Pair:
        """A writer and a target in this process, not attached."""
        options = dict(self.options)
        ends = [open_end(self.make_engine(), number, POOL_BYTES, options, self.memory) for number in (1, 2)]
        pair = Pair(ends[0], ends[1])
        pair.writer.pool[:] = np.random.default_rng(5).integers(0, 256, POOL_BYTES, np.uint8)
        return pair

    def spawn(self, nbytes: int = FLOOD_BYTES, prefix: tuple[str, ...] = ()) -> EngineProcess:
        """A second process with an opened engine and a pool of nbytes."""
        process = EngineProcess(self.engine_name, dict(self.options), 99, nbytes, prefix, self.memory)
        self._processes.append(process)
        return process

    def target_writes(self) -> bool:
        """Whether the target itself writes all that arrives, so that it can stop it.

        An engine with GRANTS and BLOCKING decides from peer to peer; on one host it is taken to write directly.
        """
        caps = self.pair.target.engine.caps
        return Caps.GRANTS in caps and Caps.BLOCKING not in caps

    def setup_method(self) -> None:
        """Open the pair that most tests use."""
        self._processes: list[EngineProcess] = []
        self.pair = self.make_pair()

    def teardown_method(self) -> None:
        """End processes and engines."""
        for process in self._processes:
            process.kill()
        self.pair.close()

    # what LANDED means

    def test_landed_means_that_every_row_is_in_place_and_nothing_else_changed(self) -> None:
        """Odd sizes, shuffled on both sides, 0 to 4096 rows; the whole pool is compared at that moment."""
        assert self.pair.attach().outcome is Outcome.LANDED
        for rows in ROW_COUNTS:
            self.pair.target.pool[:] = GUARD
            batch, expected = self.scattered(rows)
            done = self.pair.write(batch)
            assert done.outcome is Outcome.LANDED, done
            assert np.array_equal(self.pair.target.pool, expected), rows

    def test_many_tickets_in_flight_land_each_for_itself(self) -> None:
        """300 batches are submitted before the first outcome is read."""
        assert self.pair.attach().outcome is Outcome.LANDED
        size = 5000
        offsets = np.random.default_rng(6).permutation(300) * size
        open_tickets = {
            self.pair.writer.engine.submit(self.pair.target.me, self.pair.batch([at], [at], [size])): int(at)
            for at in offsets
        }
        until = time.monotonic() + 10
        while open_tickets and time.monotonic() < until:
            for done in self.pair.step():
                at = open_tickets.pop(done.ticket)
                assert done.outcome is Outcome.LANDED, done
                assert np.array_equal(self.pair.target.pool[at : at + size], self.pair.writer.pool[at : at + size])
        assert not open_tickets

    # what is refused

    def test_a_source_row_outside_the_registered_memory_is_refused_by_number(self) -> None:
        """Nothing of the batch is written, and the next one is."""
        assert self.pair.attach().outcome is Outcome.LANDED
        done = self.pair.write(self.pair.batch([0, 100, POOL_BYTES - 1], [0, 100, 200], [10, 10, 2]))
        assert done.outcome is Outcome.FAILED_QUIET
        assert "row 2" in done.cause
        self.assert_untouched()
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.LANDED

    def test_a_batch_over_the_limits_or_with_a_wrong_total_is_refused(self) -> None:
        """The limits are part of the contract, so they are checked."""
        assert self.pair.attach().outcome is Outcome.LANDED
        rows = self.pair.writer.engine.limits.rows + 1
        done = self.pair.write(self.pair.batch(np.arange(rows), np.arange(rows), np.ones(rows)))
        assert done.outcome is Outcome.FAILED_QUIET
        good = self.pair.batch([0], [0], [10])
        done = self.pair.write(Batch(good.src, good.dst, good.nbytes, 11, good.claim))
        assert done.outcome is Outcome.FAILED_QUIET
        self.assert_untouched()

    def test_a_target_row_outside_the_grant_is_refused_before_a_byte_is_written(self) -> None:
        """Where the target writes; elsewhere the writer is trusted with the target's memory."""
        if not self.target_writes():
            return
        assert self.pair.attach().outcome is Outcome.LANDED
        done = self.pair.write(self.pair.batch([0, 0], [0, POOL_BYTES - 5], [10, 10]))
        assert done.outcome is Outcome.FAILED_QUIET
        assert "row 1" in done.cause
        assert self.pair.write(self.pair.batch([0], [0], [10], claim=8)).outcome is Outcome.FAILED_QUIET
        self.pair.target.grants.drop(self.pair.writer.me, 7)
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET
        self.assert_untouched()

    def test_a_blob_that_is_garbage_is_refused_and_a_good_one_still_attaches(self) -> None:
        """Garbage ends the attach ticket; it raises nothing."""
        for blob in _GARBAGE:
            done = self.pair.settle(self.pair.writer.engine.attach(self.pair.target.me, blob))
            assert done.outcome is Outcome.FAILED_QUIET
            assert done.cause
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET
        assert self.pair.attach().outcome is Outcome.LANDED

    # what is left behind

    def test_attaching_and_detaching_leaves_no_descriptor_and_no_thread(self) -> None:
        """Also with engines that are opened and closed; unknown peers and a second close are ignored."""
        self.cycle()
        before = _resources()
        for _ in range(self.cycles):
            self.cycle()
        _wait_until(lambda: _resources() == before)
        assert _resources() == before

    # what proves quiet

    def test_writing_to_a_process_that_was_killed_fails(self) -> None:
        """It never lands, and the outcome comes by itself."""
        process = self.spawn(1 << 20)
        process.do("grant", peer=[1, 0], claim=7)
        assert self.settled_attach(process).outcome is Outcome.LANDED
        assert self.write_to(process).outcome is Outcome.LANDED
        assert process.do("bytes", offset=0, nbytes=50)["bytes"] == self.pair.writer.pool[:50].tobytes().hex()
        process.kill()
        failed = (Outcome.FAILED_QUIET, Outcome.FAILED_UNKNOWN)
        assert self.write_to(process).outcome in failed
        assert self.write_to(process).outcome in failed

    def test_a_fence_ends_when_the_writer_was_killed_and_then_nothing_lands(self) -> None:
        """The writer writes without a pause until it is killed."""
        process = self.flooding()
        ticket = self.pair.target.engine.fence(process.peer)
        process.kill()
        self.assert_fence_lands(ticket)
        self.assert_still_for(0.1)

    def test_a_stopped_writer_proves_nothing_unless_the_target_itself_can_stop_the_rows(self) -> None:
        """Where the writer writes, the fence waits for its end; else nothing lands even after SIGCONT."""
        process = self.flooding()
        process.stop()
        ticket = self.pair.target.engine.fence(process.peer)
        if self.target_writes():
            self.assert_fence_lands(ticket)
            process.go_on()
            self.assert_still_for(0.2)
            return
        outcome = wait_for(self.pair.target.engine, ticket, 0.5)
        if Caps.FENCE not in self.pair.target.engine.caps:
            assert outcome is Outcome.FAILED_QUIET
            return
        assert outcome is None
        process.kill()
        self.assert_fence_lands(ticket)
        self.assert_still_for(0.1)

    def test_a_fence_on_a_peer_that_never_attached_ends_at_once_and_keeps_it_out(self) -> None:
        """What is proven must stay true: a later attach is refused."""
        engine = self.pair.target.engine
        if Caps.FENCE not in engine.caps:
            assert wait_for(engine, engine.fence(self.pair.writer.me), 5) is Outcome.FAILED_QUIET
            return
        assert wait_for(engine, engine.fence(self.pair.writer.me), 5) is Outcome.LANDED
        done = self.pair.attach()
        assert done.outcome is Outcome.FAILED_QUIET
        assert "fence" in done.cause

    def test_a_writer_that_detached_is_quiet(self) -> None:
        """It says so itself, so that a fence does not wait for the end of its process."""
        engine = self.pair.target.engine
        if Caps.FENCE not in engine.caps:
            return
        assert self.pair.attach().outcome is Outcome.LANDED
        self.pair.writer.engine.detach(self.pair.target.me)
        assert wait_for(engine, engine.fence(self.pair.writer.me), 5) is Outcome.LANDED

    # helpers

    def scattered(self, rows: int) -> tuple[Batch, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        """A batch of odd-sized rows, shuffled on both sides, and what the target must hold afterwards."""
        random = np.random.default_rng(rows)
        nbytes = random.integers(1, 2000, rows)
        starts = np.arange(rows) * 2000
        src, dst = random.permutation(starts), random.permutation(starts) + 3
        expected = self.pair.target.pool.copy()
        for here, there, length in zip(src, dst, nbytes, strict=True):
            expected[there : there + length] = self.pair.writer.pool[here : here + length]
        return self.pair.batch(src, dst, nbytes), expected

    def assert_untouched(self) -> None:
        """The target's pool holds guard bytes only."""
        assert (self.pair.target.pool == GUARD).all()

    def cycle(self) -> None:
        """Open, attach, write, detach on either side first, close twice."""
        for first in ("writer", "target"):
            pair = self.make_pair()
            assert pair.attach().outcome is Outcome.LANDED
            assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED
            ends: list[tuple[End, PeerId]] = [(pair.writer, pair.target.me), (pair.target, pair.writer.me)]
            for end, peer in ends if first == "writer" else ends[::-1]:
                end.engine.detach(peer)
                end.engine.detach(peer)
            pair.step()
            pair.close()
            pair.close()

    def settled_attach(self, process: EngineProcess) -> Done:
        """Attach the writer of the pair to a process."""
        return self.pair.settle(self.pair.writer.engine.attach(process.peer, process.blob))

    def write_to(self, process: EngineProcess) -> Done:
        """Write 50 bytes to the start of a process's pool."""
        word = self.pair.batch([0], [0], [50])
        batch = Batch(word.src, np.array([process.address], np.uint64), word.nbytes, 50, 7)
        return self.pair.settle(self.pair.writer.engine.submit(process.peer, batch))

    def flooding(self) -> EngineProcess:
        """A process that has attached to the pair's target and writes to it without a pause."""
        process, target = self.spawn(), self.pair.target
        target.grant(process.peer)
        attached = process.attach(target.me, target.engine.describe())
        assert attached["outcome"] == Outcome.LANDED.value, attached
        process.flood(target.me, 7, target.address)
        _wait_until(lambda: bool(target.pool[0] != GUARD))
        assert target.pool[0] != GUARD
        return process

    def assert_fence_lands(self, ticket: int) -> None:
        """A fence of the pair's target ends within 5 s."""
        assert wait_for(self.pair.target.engine, ticket, 5) is Outcome.LANDED

    def assert_still_for(self, seconds: float) -> None:
        """The target's pool does not change any more."""
        before = self.pair.target.pool.copy()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.pair.target.engine.poll(0.01)
        assert np.array_equal(before, self.pair.target.pool)


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _wait_until(condition: object, limit_s: float = 5.0) -> None:
    assert callable(condition)
    until = time.monotonic() + limit_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
