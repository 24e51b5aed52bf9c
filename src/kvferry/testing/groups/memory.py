"""Group `memory`: memory that was not registered, not granted, or is not there, on either side."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from kvferry.engines.seam import Outcome
from kvferry.testing.suite_base import FAILED, POOL_BYTES, SuiteBase
from kvferry.testing.suite_memory import device_of, new_pool
from kvferry.testing.suite_pair import CLAIM, GUARD, batch_between


class Memory(SuiteBase):
    """Refused before a byte is written where somebody can look, and in no case the end of a process."""

    group: ClassVar[str] = "memory"

    def test_a_source_row_outside_the_registered_memory_is_refused_by_number(self) -> None:
        """Nothing of the batch is written, and the next one is."""
        assert self.pair.attach().outcome is Outcome.LANDED
        done = self.pair.write(self.pair.batch([0, 100, POOL_BYTES - 1], [0, 100, 200], [10, 10, 2]))
        assert done.outcome is Outcome.FAILED_QUIET
        assert "row 2" in done.cause
        self.assert_untouched()
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.LANDED

    @pytest.mark.parametrize("place", ["before", "behind", "at zero", "past the end of addresses"])
    def test_a_source_row_anywhere_else_is_refused(self, place: str) -> None:
        """Also where its end runs over the largest address."""
        assert self.pair.attach().outcome is Outcome.LANDED
        address = self.pair.writer.address
        start = {"before": address - 1, "behind": address + POOL_BYTES, "at zero": 0}.get(place, 2**64 - 5)
        batch = self.pair.batch([0], [0], [10])
        batch.src[:] = np.uint64(start)
        assert self.pair.write(batch).outcome is Outcome.FAILED_QUIET
        self.assert_untouched()

    def test_a_target_row_outside_the_grant_is_refused_before_a_byte_is_written(self) -> None:
        """Where the target writes; elsewhere the writer is trusted with the target's memory."""
        if not self.target_writes():
            pytest.skip("the writer's process writes: it is trusted with the target's memory")
        assert self.pair.attach().outcome is Outcome.LANDED
        done = self.pair.write(self.pair.batch([0, 0], [0, POOL_BYTES - 5], [10, 10]))
        assert done.outcome is Outcome.FAILED_QUIET
        assert "row 1" in done.cause
        assert self.pair.write(self.pair.batch([0], [0], [10], claim=8)).outcome is Outcome.FAILED_QUIET
        self.pair.target.grants.drop(self.pair.writer.me, CLAIM)
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET
        self.assert_untouched()

    def test_a_row_into_memory_that_the_target_never_registered_lands_there_or_fails(self) -> None:
        """It never goes anywhere else; the pool stays as it was, and can be written to afterwards."""
        assert self.pair.attach().outcome is Outcome.LANDED
        stray = new_pool(self.provider(), 4096)
        stray[:] = GUARD
        stray_address = int(stray.ctypes.data)
        batch = batch_between(self.pair.writer, stray_address, [0], [100], [1000])
        done = self.pair.write(batch)
        if self.target_writes():
            assert done.outcome is Outcome.FAILED_QUIET
        if done.outcome is Outcome.LANDED:
            assert np.array_equal(stray[100:1100], self.pair.writer.pool[:1000])
        elif done.outcome is Outcome.FAILED_QUIET:
            assert ((stray[100:1100] == GUARD) | (stray[100:1100] == self.pair.writer.pool[:1000])).all()
        assert (stray[:100] == GUARD).all()
        assert (stray[1100:] == GUARD).all()
        self.assert_untouched()
        self._goes_on(done.outcome)

    def test_a_row_to_an_address_where_the_other_process_has_nothing_fails_and_ends_nobody(self) -> None:
        """Both processes live, and the next batch lands."""
        if device_of(self.pair.target.pool) >= 0:
            pytest.skip("an address of host memory is no address of a device's")
        process = self.spawn_target()
        batch = batch_between(self.pair.writer, process.nowhere, [0], [0], [100])
        done = self.pair.settle(self.pair.writer.engine.submit(process.peer, batch))
        assert done.outcome in FAILED
        assert done.cause
        if self.write_to(process).outcome is not Outcome.LANDED:  # some engines give the whole peer up
            assert self.settled_attach(process).outcome is Outcome.LANDED
            assert self.write_to(process).outcome is Outcome.LANDED
        assert process.do("bytes", offset=0, nbytes=50)["bytes"] == self.pair.writer.pool[:50].tobytes().hex()

    def _goes_on(self, outcome: Outcome) -> None:
        """The pair works; after a failure the peer may have to be attached anew."""
        if outcome is not Outcome.LANDED:
            assert self.pair.attach().outcome is Outcome.LANDED
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.LANDED
        assert np.array_equal(self.pair.target.pool[:10], self.pair.writer.pool[:10])
