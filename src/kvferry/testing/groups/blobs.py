"""Group `blobs`: what a peer says of itself may be garbage, cut short, altered, or somebody else's."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvferry.engines import find
from kvferry.engines.grants import GrantTable
from kvferry.engines.seam import EngineConfig, Outcome
from kvferry.ids import PeerId
from kvferry.testing.suite_base import FAILED, SuiteBase

_GARBAGE = (b"", b"\0" * 40, b"not a blob", b"\xff" * 200_000)
_CUTS = 6
_FLIPS = 12


class Blobs(SuiteBase):
    """Whatever it is, it ends the attach ticket, raises nothing, and a good blob still attaches."""

    group: ClassVar[str] = "blobs"

    def test_a_blob_that_is_garbage_is_refused_and_a_good_one_still_attaches(self) -> None:
        """Garbage ends the attach ticket; it raises nothing."""
        for blob in _GARBAGE:
            self._assert_refused(blob)
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.FAILED_QUIET
        self._assert_good_attaches()

    def test_a_blob_that_was_cut_short_is_refused(self) -> None:
        """At any place; also one with something behind it that is too long to be a blob."""
        good = self.pair.target.engine.describe()
        for length in np.linspace(1, len(good) - 1, _CUTS).astype(int):
            self._assert_refused(good[:length])
        self._assert_refused(good * (1 + 200_000 // len(good)))
        self._assert_good_attaches()

    def test_a_blob_of_another_engine_is_refused(self) -> None:
        """It is well-formed in that engine's own words."""
        name = "local" if find.canonical(self.engine_name) != "local" else ""
        foreign = _described(name) if name else b'{"version": 1, "agent": "peer", "metadata": "AAAA"}'
        self._assert_refused(foreign)
        self._assert_good_attaches()

    def test_a_blob_in_which_a_byte_was_changed_does_no_harm(self) -> None:
        """What is not looked at may change and attach all the same; nothing raises, nothing lands anywhere."""
        good = self.pair.target.engine.describe()
        for place in np.linspace(0, len(good) - 1, _FLIPS).astype(int):
            flipped = bytearray(good)
            flipped[place] ^= 0x55
            ticket = self.pair.writer.engine.attach(self.pair.target.me, bytes(flipped))
            done = self.pair.settle(ticket)
            assert done.outcome in {Outcome.LANDED, *FAILED}
            assert done.outcome is Outcome.LANDED or done.cause
        self.assert_untouched()
        self._assert_good_attaches()

    def test_the_blob_of_an_engine_that_was_closed_is_refused(self) -> None:
        """It was good a moment ago."""
        other = self.another_end(3, 4096)
        blob = other.engine.describe()
        other.engine.close()
        done = self.pair.settle(self.pair.writer.engine.attach(other.me, blob))
        assert done.outcome in FAILED
        assert done.cause
        self._assert_good_attaches()

    def test_a_good_blob_after_a_bad_one_is_what_counts(self) -> None:
        """Attaching again replaces, while the first try may still be under way."""
        good = self.pair.target.engine.describe()
        self.pair.target.grant(self.pair.writer.me)
        bad = self.pair.writer.engine.attach(self.pair.target.me, good[: len(good) // 2])
        then = self.pair.writer.engine.attach(self.pair.target.me, good)
        assert self.pair.settle(bad).outcome is Outcome.FAILED_QUIET
        assert self.pair.settle(then).outcome is Outcome.LANDED
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.LANDED

    def _assert_refused(self, blob: bytes) -> None:
        done = self.pair.settle(self.pair.writer.engine.attach(self.pair.target.me, blob))
        assert done.outcome is Outcome.FAILED_QUIET
        assert done.cause

    def _assert_good_attaches(self) -> None:
        assert self.pair.attach().outcome is Outcome.LANDED
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.LANDED
        assert np.array_equal(self.pair.target.pool[:10], self.pair.writer.pool[:10])


def _described(name: str) -> bytes:
    engine = find.load(name)
    engine.open(EngineConfig(PeerId(50), GrantTable()))
    try:
        return engine.describe()
    finally:
        engine.close()
