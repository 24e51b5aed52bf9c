"""Group `proofs`: after each proof that nothing more can land, nothing lands.

The writer of some tests holds batches back (`Faulty.hold`) and lets them go after the proof, which is what a late write
of real hardware looks like.
"""

from __future__ import annotations

import contextlib
from typing import ClassVar

import numpy as np
import pytest

from kvferry.engines.seam import Caps, Done, Outcome, Ticket
from kvferry.testing.suite_base import FAILED, SuiteBase
from kvferry.testing.suite_pair import CLAIM, GUARD, SETTLE_S, Pair

_STILL_S = 0.15
_ROW = 200_000


class Proofs(SuiteBase):
    """The rows of the page on what proves quiet."""

    group: ClassVar[str] = "proofs"

    # the writer's outcomes

    def test_a_batch_that_was_refused_never_lands(self) -> None:
        """FAILED_QUIET is a proof at once."""
        assert self.pair.attach().outcome is Outcome.LANDED
        done = self.pair.write(self.pair.batch([0, self.pair.writer.pool.nbytes - 1], [0, 50], [10, 2]))
        assert done.outcome is Outcome.FAILED_QUIET
        self.assert_still_for(_STILL_S)
        self.assert_untouched()

    @pytest.mark.parametrize("side", ["writer", "target"])
    def test_tickets_that_are_cut_by_a_detach_end_and_say_the_truth(self, side: str) -> None:
        """What LANDED is there, what is quiet stays as it is; a ticket that may still land says so."""
        assert self.pair.attach().outcome is Outcome.LANDED
        tickets = self._submit_rows()
        if side == "writer":
            self.pair.writer.engine.detach(self.pair.target.me)
        else:
            self.pair.target.engine.detach(self.pair.writer.me)
        self._check_outcomes(tickets, self.settle_all(tickets))

    def test_a_new_attachment_ends_what_was_under_way_by_the_old_one(self) -> None:
        """When it is LANDED, each earlier ticket has ended or is called quiet; then nothing of them lands."""
        assert self.pair.attach().outcome is Outcome.LANDED
        tickets = self._submit_rows()
        again = self.pair.writer.engine.attach(self.pair.target.me, self.pair.target.engine.describe())
        assert self.pair.settle(again).outcome is Outcome.LANDED
        self._check_outcomes(tickets, self.settle_all(tickets))
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.LANDED

    # the target's fence

    def test_without_the_capability_a_fence_ends_at_once_and_proves_nothing(self) -> None:
        """Whether or not the peer is attached."""
        if Caps.FENCE in self.caps:
            pytest.skip("has FENCE: the other tests show what it proves")
        target = self.pair.target
        for _ in range(2):
            done = target.wait(target.engine.fence(self.pair.writer.me), SETTLE_S / 6)
            assert done.outcome is Outcome.FAILED_QUIET
            assert done.cause
            assert self.pair.attach().outcome is Outcome.LANDED
        self.refused(Caps.FENCE)

    def test_a_fence_on_a_peer_that_never_attached_ends_at_once_and_keeps_it_out(self) -> None:
        """What is proven must stay true: a later attach is refused."""
        self.needs(Caps.FENCE, "nothing proves that a peer stays out")
        self.assert_fence_lands(self.pair.target.engine.fence(self.pair.writer.me))
        done = self.pair.attach()
        assert done.outcome is Outcome.FAILED_QUIET
        assert done.cause

    def test_a_writer_that_detached_is_quiet(self) -> None:
        """It says so itself, so that a fence does not wait for the end of its process."""
        self.needs(Caps.FENCE, "nothing waits for the writer's word")
        assert self.pair.attach().outcome is Outcome.LANDED
        self.pair.writer.engine.detach(self.pair.target.me)
        self.assert_fence_lands(self.pair.target.engine.fence(self.pair.writer.me))

    def test_what_a_writer_held_back_does_not_land_after_it_detached_and_the_fence_landed(self) -> None:
        """Hold, proof, release."""
        self.needs(Caps.FENCE, "the target has no proof")
        pair, ticket = self._held_back()
        pair.writer.engine.detach(pair.target.me)
        self.assert_fence_lands(pair.target.engine.fence(pair.writer.me))
        self._release(ticket)

    def test_what_a_writer_held_back_does_not_land_after_the_target_cut_it_off(self) -> None:
        """Where the target writes it needs nobody's word: hold, fence, release."""
        self._needs_a_target_that_writes()
        pair, ticket = self._held_back()
        self.assert_fence_lands(pair.target.engine.fence(pair.writer.me))
        self._release(ticket)

    def test_a_fence_of_one_claim_stops_that_one_only(self) -> None:
        """Hold rows of two claims, fence one of them, release."""
        self._needs_a_target_that_writes()
        pair, faulty = self.faulty_pair()
        assert pair.attach().outcome is Outcome.LANDED
        pair.target.grant(pair.writer.me, CLAIM + 1)
        faulty.hold()
        stopped = pair.submit(pair.batch([0], [0], [1000]))
        other = pair.submit(pair.batch([0], [5000], [1000], CLAIM + 1))
        self.assert_fence_lands(pair.target.engine.fence(pair.writer.me, CLAIM))
        faulty.release()
        expected = np.full(pair.target.pool.nbytes, GUARD, np.uint8)
        expected[5000:6000] = pair.writer.pool[:1000]
        if pair.settle(other).outcome is not Outcome.LANDED:  # cutting rows of one claim may cost the connection
            assert pair.attach().outcome is Outcome.LANDED
            assert pair.write(pair.batch([0], [5000], [1000], CLAIM + 1)).outcome is Outcome.LANDED
        assert pair.settle(stopped).outcome in FAILED
        self.assert_holds(expected)

    def test_what_a_writer_held_back_does_not_land_after_the_grant_was_dropped(self) -> None:
        """Dropping a grant is enough where the target looks at every row."""
        self._needs_a_target_that_writes()
        pair, ticket = self._held_back()
        pair.target.grants.drop(pair.writer.me, CLAIM)
        assert not pair.target.grants.in_use(pair.writer.me, CLAIM)
        self._release(ticket)

    def test_a_fence_ends_when_the_writer_was_killed_and_then_nothing_lands(self) -> None:
        """The writer writes without a pause until it is killed."""
        self.needs(Caps.FENCE, "the end of a process proves nothing here")
        process = self.flooding()
        ticket = self.pair.target.engine.fence(process.peer)
        process.kill()
        self.assert_fence_lands(ticket)
        self.assert_still_for(_STILL_S)

    def test_a_fence_ends_when_the_writing_process_detaches_and_then_nothing_lands(self) -> None:
        """It lives on, and is asked to stop."""
        self.needs(Caps.FENCE, "the target has no proof")
        process = self.flooding()
        ticket = self.pair.target.engine.fence(process.peer)
        process.do("detach", peer=[self.pair.target.me.incarnation, 0])
        self.assert_fence_lands(ticket)
        self.assert_still_for(_STILL_S)

    def test_a_stopped_writer_proves_nothing_unless_the_target_itself_can_stop_the_rows(self) -> None:
        """The fence waits for its end, unless the target can shut it out: then nothing lands even after SIGCONT."""
        process = self.flooding()
        process.stop()
        target = self.pair.target
        ticket = target.engine.fence(process.peer)
        if Caps.FENCE not in self.caps:
            assert target.wait(ticket, SETTLE_S / 6).outcome is Outcome.FAILED_QUIET
            self.refused(Caps.FENCE)
            return
        lands = self._lands_within(ticket, 0.5)
        assert lands or not self.target_writes()
        if lands:
            process.go_on()
            self.assert_still_for(0.5)
            return
        process.kill()
        self.assert_fence_lands(ticket)
        self.assert_still_for(_STILL_S)

    # helpers

    def _lands_within(self, ticket: Ticket, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            return self.pair.target.wait(ticket, seconds).outcome is Outcome.LANDED
        return False

    def _needs_a_target_that_writes(self) -> None:
        if not self.target_writes():
            pytest.skip("the writer's process writes: the target can't stop its rows")

    def _held_back(self) -> tuple[Pair, Ticket]:
        """A row that the writer's engine has taken, and holds."""
        pair, faulty = self.faulty_pair()
        assert pair.attach().outcome is Outcome.LANDED
        faulty.hold()
        return pair, pair.submit(pair.batch([0], [0], [_ROW]))

    def _submit_rows(self) -> list[Ticket]:
        """One row for each of 20 tickets, ticket i to a place of its own."""
        return [self.pair.submit(self.pair.batch([at], [at], [_ROW])) for at in range(0, 20 * _ROW, _ROW)]

    def _check_outcomes(self, tickets: list[Ticket], ended: list[Done]) -> None:
        """At this moment: rows of LANDED are there; those of the others may be, but don't change once quiet."""
        source, quiet = self.pair.writer.pool.copy(), []
        for number, (ticket, done) in enumerate(zip(tickets, ended, strict=True)):
            row = slice(number * _ROW, (number + 1) * _ROW)
            if done.outcome is Outcome.LANDED:
                assert np.array_equal(self.pair.target.pool[row], source[row]), number
            if done.outcome is not Outcome.FAILED_UNKNOWN or self.pair.writer.take(ticket) is not None:
                quiet.append((row, self.pair.target.pool[row].copy()))
        self.assert_ends_only(source)
        self._poll_for(_STILL_S)
        for row, before in quiet:
            assert np.array_equal(self.pair.target.pool[row], before)

    def assert_ends_only(self, source: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Behind the rows the target holds guard bytes only, and in them nothing but guard or source bytes."""
        pool = self.pair.target.pool.copy()
        rows = slice(0, 20 * _ROW)
        assert ((pool[rows] == GUARD) | (pool[rows] == source[rows])).all()
        assert (pool[rows.stop :] == GUARD).all()

    def _release(self, ticket: Ticket) -> None:
        """Let go what the writer holds: it fails, and no byte of the target changes."""
        faulty = self.pair.writer.engine
        assert getattr(faulty, "held", 0)
        getattr(faulty, "release")()  # noqa: B009 - the wrapper's call, not the seam's
        assert self.pair.settle(ticket).outcome in FAILED
        self.assert_still_for(_STILL_S)
        self.assert_untouched()

    def _poll_for(self, seconds: float) -> None:
        with pytest.raises(TimeoutError):
            self.pair.settle(-1, seconds)
