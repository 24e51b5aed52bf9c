"""Group `registration`: which memory an engine takes, and the bounds of a batch."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from kvferry.engines.seam import MAX_BLOB_BYTES, Batch, Caps, Outcome, Region
from kvferry.errors import EngineError
from kvferry.testing.suite_base import POOL_BYTES, SuiteBase
from kvferry.testing.suite_memory import device_of, region_of
from kvferry.testing.suite_pair import GUARD


class Registration(SuiteBase):
    """Regions, limits and the checks that an engine makes before anything is sent."""

    group: ClassVar[str] = "registration"

    @pytest.mark.parametrize("region", [Region(-1, 10), Region(4096, -1), Region(2**64 - 5, 10)], ids=str)
    def test_a_region_that_is_no_memory_is_refused_by_number(self, region: Region) -> None:
        """The message says which of the regions it is."""
        good = region_of(self.pair.writer.pool)
        with pytest.raises(EngineError, match="region 1"):
            self.pair.writer.engine.register([good, region])

    def test_a_device_region_is_refused_by_number_without_the_capability(self) -> None:
        """With DEVICE_MEMORY it is shown by the whole suite, run with --kvferry-memory cuda."""
        if Caps.DEVICE_MEMORY in self.caps:
            pytest.skip("has DEVICE_MEMORY: --kvferry-memory cuda shows it")
        pool = self.pair.writer.pool
        with pytest.raises(EngineError, match="region 1"):
            self.pair.writer.engine.register([region_of(pool), Region(self.pair.writer.address, pool.nbytes, device=0)])
        self.refused(Caps.DEVICE_MEMORY)

    def test_registering_again_replaces_what_was_registered(self) -> None:
        """Rows of what is registered no more are refused, and those of what still is land."""
        assert self.pair.attach().outcome is Outcome.LANDED
        writer, half = self.pair.writer, POOL_BYTES // 2
        writer.engine.register([Region(writer.address, half, device_of(writer.pool))])
        assert self.pair.write(self.pair.batch([half - 10], [0], [11])).outcome is Outcome.FAILED_QUIET
        self.assert_untouched()
        assert self.pair.write(self.pair.batch([half - 10], [0], [10])).outcome is Outcome.LANDED
        writer.engine.register([region_of(writer.pool)])
        assert self.pair.write(self.pair.batch([half - 10], [0], [11])).outcome is Outcome.LANDED

    def test_rows_are_taken_from_each_of_several_regions(self) -> None:
        """The hole between them is registered no more than what lies beyond."""
        assert self.pair.attach().outcome is Outcome.LANDED
        writer, device, piece = self.pair.writer, device_of(self.pair.writer.pool), 1 << 20
        starts = np.arange(3) * 2 * piece
        writer.engine.register([Region(writer.address + int(start), piece, device) for start in starts])
        expected = self.pair.target.pool.copy()
        source = writer.pool.copy()
        for start in starts:
            expected[start + 1 : start + 1000] = source[start : start + 999]
        assert self.pair.write(self.pair.batch(starts, starts + 1, [999] * 3)).outcome is Outcome.LANDED
        done = self.pair.write(self.pair.batch([0, piece + 5], [0, 0], [10, 10]))
        assert done.outcome is Outcome.FAILED_QUIET
        self.assert_holds(expected)

    def test_a_batch_over_the_limits_or_with_a_wrong_total_is_refused(self) -> None:
        """The limits are part of the contract, so they are checked."""
        assert self.pair.attach().outcome is Outcome.LANDED
        limits = self.pair.writer.engine.limits
        rows = limits.rows + 1
        done = self.pair.write(self.pair.batch(np.arange(rows), np.arange(rows), np.ones(rows)))
        assert done.outcome is Outcome.FAILED_QUIET
        good = self.pair.batch([0], [0], [10])
        done = self.pair.write(Batch(good.src, good.dst, good.nbytes, 11, good.claim))
        assert done.outcome is Outcome.FAILED_QUIET
        self.assert_untouched()

    def test_a_batch_of_too_many_bytes_is_refused(self) -> None:
        """Rows may share their source, so that the pool need not be that large."""
        assert self.pair.attach().outcome is Outcome.LANDED
        limits = self.pair.writer.engine.limits
        row = min(POOL_BYTES, -(-limits.bytes // limits.rows) + 1)
        count = limits.bytes // row + 1
        if count > limits.rows:
            pytest.skip(f"{limits.rows} rows of a pool of {POOL_BYTES} bytes stay below {limits.bytes} bytes")
        done = self.pair.write(self.pair.batch(np.zeros(count), np.zeros(count), np.full(count, row)))
        assert done.outcome is Outcome.FAILED_QUIET
        self.assert_untouched()

    def test_a_batch_of_as_many_rows_as_the_limit_lands(self) -> None:
        """And of none at all."""
        assert self.pair.attach().outcome is Outcome.LANDED
        limits = self.pair.writer.engine.limits
        assert limits.rows >= 1
        assert limits.bytes >= 1
        rows = min(limits.rows, POOL_BYTES // 2, limits.bytes)
        at = np.arange(rows) * 2
        expected = self.pair.target.pool.copy()
        expected[at] = self.pair.writer.pool.copy()[at]
        assert self.pair.write(self.pair.batch(at, at, np.ones(rows))).outcome is Outcome.LANDED
        self.assert_holds(expected)
        assert self.pair.write(self.pair.batch([], [], [])).outcome is Outcome.LANDED

    def test_what_an_engine_says_of_itself_is_bytes_of_at_most_64_kib(self) -> None:
        """It travels in a message that is checked for its size."""
        said = self.pair.target.engine.describe()
        assert isinstance(said, bytes)
        assert 0 < len(said) <= MAX_BLOB_BYTES

    def test_a_target_that_does_not_poll_is_written_to_unless_the_engine_says_that_it_must(self) -> None:
        """NEEDS_TARGET_POLL is said by those that need it, and by nobody else."""
        if Caps.NEEDS_TARGET_POLL in self.caps:
            pytest.skip("has NEEDS_TARGET_POLL: every other test polls the target")
        writer, target = self.pair.writer, self.pair.target
        target.grant(writer.me)
        assert writer.wait(writer.engine.attach(target.me, target.engine.describe())).outcome is Outcome.LANDED
        assert writer.wait(self.pair.submit(self.pair.batch([0], [0], [100]))).outcome is Outcome.LANDED
        assert np.array_equal(target.pool[:101], [*writer.pool[:100], GUARD])
