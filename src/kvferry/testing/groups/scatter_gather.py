"""Group `scatter_gather`: every byte is where it belongs when a ticket is LANDED, and no other changed."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvferry.engines.seam import Outcome
from kvferry.testing.suite_base import POOL_BYTES, SuiteBase
from kvferry.testing.suite_pair import GUARD, batch_between

ROW_COUNTS = (0, 1, 2, 3, 64, 1025, 4096)
_SIZES = (1, 2, 7, 4095, 4096, 4097, 65535, 65536, 1 << 20, (2 << 20) + 1)
_ROUNDS = 40


class ScatterGather(SuiteBase):
    """Exactness of what lands."""

    group: ClassVar[str] = "scatter_gather"

    def test_landed_means_that_every_row_is_in_place_and_nothing_else_changed(self) -> None:
        """Odd sizes, shuffled on both sides, 0 to 4096 rows; the whole pool is compared at that moment."""
        assert self.pair.attach().outcome is Outcome.LANDED
        for rows in sorted({self.capped(rows) for rows in ROW_COUNTS}):
            self.pair.target.pool[:] = GUARD
            batch, expected = self.scattered(rows)
            done = self.pair.write(batch)
            assert done.outcome is Outcome.LANDED, done
            self.assert_holds(expected)

    def test_a_row_of_any_size_lands_between_its_guard_bytes(self) -> None:
        """One byte, around a page, and megabytes, at addresses that nothing is aligned to."""
        assert self.pair.attach().outcome is Outcome.LANDED
        source = self.pair.writer.pool.copy()
        for size in _SIZES:
            if size > self.pair.writer.engine.limits.bytes:
                continue
            self.pair.target.pool[:] = GUARD
            expected = self.pair.target.pool.copy()
            expected[4099 : 4099 + size] = source[13 : 13 + size]
            done = self.pair.write(self.pair.batch([13], [4099], [size]))
            assert done.outcome is Outcome.LANDED, done
            self.assert_holds(expected)

    def test_many_batches_one_after_another_add_up(self) -> None:
        """Later ones write over earlier ones; the source is only read."""
        assert self.pair.attach().outcome is Outcome.LANDED
        random, source = np.random.default_rng(8), self.pair.writer.pool.copy()
        expected = self.pair.target.pool.copy()
        slot = min(9000, self.pair.writer.engine.limits.bytes // self.capped(50))
        for _ in range(_ROUNDS):
            rows = int(random.integers(1, self.capped(50) + 1))
            nbytes = random.integers(1, slot + 1, rows)
            dst = random.choice(POOL_BYTES // slot, rows, replace=False) * slot
            src = random.integers(0, POOL_BYTES - slot, rows)
            for here, there, length in zip(src, dst, nbytes, strict=True):
                expected[there : there + length] = source[here : here + length]
            done = self.pair.write(self.pair.batch(src, dst, nbytes))
            assert done.outcome is Outcome.LANDED, done
            self.assert_holds(expected)
        assert np.array_equal(self.pair.writer.pool, source)

    def test_rows_that_touch_on_one_side_or_both_are_kept_apart_or_joined_rightly(self) -> None:
        """Engines merge neighbours; sources that touch may go to places that don't, and the other way round."""
        assert self.pair.attach().outcome is Outcome.LANDED
        source, row, rows = self.pair.writer.pool.copy(), 100, self.capped(30)
        apart, touching = np.arange(rows) * 3 * row, np.arange(rows) * row
        for src, dst in ((touching, apart), (apart, touching), (touching, touching), (touching[::-1], touching)):
            self.pair.target.pool[:] = GUARD
            expected = self.pair.target.pool.copy()
            for here, there in zip(src, dst, strict=True):
                expected[there : there + row] = source[here : here + row]
            assert self.pair.write(self.pair.batch(src, dst, np.full(rows, row))).outcome is Outcome.LANDED
            self.assert_holds(expected)

    def test_what_landed_in_another_process_is_all_there_when_it_is_asked(self) -> None:
        """Its whole pool is compared as soon as the writer knows."""
        nbytes, row, rows = 1 << 18, 611, self.capped(200)
        process = self.spawn_target(nbytes)
        random, source = np.random.default_rng(9), self.pair.writer.pool.copy()
        dst = random.permutation(nbytes // 1000)[:rows] * 1000
        src = random.permutation(POOL_BYTES // 1000)[:rows] * 1000
        expected = np.full(nbytes, GUARD, np.uint8)
        for here, there in zip(src, dst, strict=True):
            expected[there : there + row] = source[here : here + row]
        batch = batch_between(self.pair.writer, process.address, src, dst, np.full(rows, row))
        assert self.pair.settle(self.pair.writer.engine.submit(process.peer, batch)).outcome is Outcome.LANDED
        assert bytes.fromhex(process.do("bytes", offset=0, nbytes=nbytes)["bytes"]) == expected.tobytes()
