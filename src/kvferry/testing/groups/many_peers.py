"""Group `many_peers`: many tickets and several peers at once, each for itself."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np

from kvferry.engines.seam import Caps, Outcome, Ticket
from kvferry.testing.suite_base import SuiteBase
from kvferry.testing.suite_pair import GUARD, SETTLE_S, End, batch_between

_POOL = 1 << 20
_SIZE = 5000
_EACH = 30


class ManyPeers(SuiteBase):
    """What is under way at the same time does not get mixed up."""

    group: ClassVar[str] = "many_peers"

    def test_many_tickets_in_flight_land_each_for_itself(self) -> None:
        """300 batches are submitted before the first outcome is read."""
        assert self.pair.attach().outcome is Outcome.LANDED
        source = self.pair.writer.pool.copy()
        offsets = np.random.default_rng(6).permutation(300) * _SIZE
        open_tickets = {self.pair.submit(self.pair.batch([at], [at], [_SIZE])): int(at) for at in offsets}
        until = time.monotonic() + SETTLE_S
        while open_tickets and time.monotonic() < until:
            for done in self.pair.step():
                at = open_tickets.pop(done.ticket)
                assert done.outcome is Outcome.LANDED, done
                assert np.array_equal(self.pair.target.pool[at : at + _SIZE], source[at : at + _SIZE])
        assert not open_tickets

    def test_one_writer_serves_several_targets_in_turns(self) -> None:
        """What is for one of them changes no byte of another."""
        targets = [self.pair.target, *[self.another_end(number, _POOL) for number in (3, 4)]]
        self._attach_all(self.pair.writer, targets)
        source = self.pair.writer.pool.copy()
        expected = [target.pool.copy() for target in targets]
        tickets: list[Ticket] = []
        for number in range(_EACH):
            for index, target in enumerate(targets):
                src, dst = (number * 3 + index) * _SIZE, number * _SIZE + index
                batch = batch_between(self.pair.writer, target.address, [src], [dst], [_SIZE - 7])
                tickets.append(self.pair.writer.engine.submit(target.me, batch))
                expected[index][dst : dst + _SIZE - 7] = source[src : src + _SIZE - 7]
        for ticket in tickets:
            done = self.pair.writer.wait(ticket, meanwhile=lambda: [target.poll() for target in targets])
            assert done.outcome is Outcome.LANDED, done
        for target, bytes_there in zip(targets, expected, strict=True):
            assert np.array_equal(target.pool, bytes_there)

    def test_several_writers_write_to_one_target_at_once(self) -> None:
        """Each to places of its own, in turns with the others."""
        target = self.pair.target
        writers = [self.pair.writer, *[self.another_end(number, _POOL) for number in (3, 4)]]
        for writer in writers:
            self._attach_all(writer, [target])
        expected = target.pool.copy()
        tickets: list[tuple[End, Ticket]] = []
        for index, writer in enumerate(writers):
            writer.pool[:_POOL] = np.random.default_rng(index).integers(0, 256, _POOL, np.uint8)
        for number in range(_EACH):
            for index, writer in enumerate(writers):
                dst = (number * len(writers) + index) * _SIZE
                batch = batch_between(writer, target.address, [number], [dst], [_SIZE])
                tickets.append((writer, writer.engine.submit(target.me, batch)))
                expected[dst : dst + _SIZE] = writer.pool[number : number + _SIZE]
        for writer, ticket in tickets:
            assert writer.wait(ticket, meanwhile=target.poll).outcome is Outcome.LANDED
        self.assert_holds(expected)

    def test_two_engines_write_to_each_other_at_once(self) -> None:
        """Both are writer and target."""
        here, there = self.pair.writer, self.pair.target
        here.pool[:] = GUARD
        self._attach_all(here, [there])
        self._attach_all(there, [here])
        here.pool[:_POOL] = 1
        there.pool[:_POOL] = 2
        tickets = []
        for number in range(_EACH):
            at = _POOL + number * _SIZE
            tickets.append((here, here.engine.submit(there.me, batch_between(here, there.address, [0], [at], [_SIZE]))))
            tickets.append(
                (there, there.engine.submit(here.me, batch_between(there, here.address, [0], [at], [_SIZE])))
            )
        for end, ticket in tickets:
            other = there if end is here else here
            assert end.wait(ticket, meanwhile=other.poll).outcome is Outcome.LANDED
        written = slice(_POOL, _POOL + _EACH * _SIZE)
        for end, value in ((here, 2), (there, 1)):
            assert (end.pool[written] == value).all()
            assert (end.pool[written.stop :] == GUARD).all()

    def test_any_thread_may_make_the_calls_where_the_engine_says_so(self) -> None:
        """One at a time: attached here, submitted in one thread, polled in another."""
        self.needs(Caps.ANY_THREAD, "one thread makes all calls")
        assert self.pair.attach().outcome is Outcome.LANDED
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            for at in range(0, _EACH * _SIZE, _SIZE):
                ticket = one.submit(self.pair.submit, self.pair.batch([at], [at], [_SIZE])).result()
                done = other.submit(self.pair.settle, ticket).result()
                assert done.outcome is Outcome.LANDED, done
        assert np.array_equal(self.pair.target.pool[: _EACH * _SIZE], self.pair.writer.pool[: _EACH * _SIZE])

    def _attach_all(self, writer: End, targets: list[End]) -> None:
        for target in targets:
            target.grant(writer.me)
            ticket = writer.engine.attach(target.me, target.engine.describe())
            done = writer.wait(ticket, meanwhile=target.poll)
            assert done.outcome is Outcome.LANDED, done
