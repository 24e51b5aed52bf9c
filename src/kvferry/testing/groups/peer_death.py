"""Group `peer_death`: a real process is killed, stopped, or comes again; it costs its own tickets and nothing else."""

from __future__ import annotations

import threading
from typing import ClassVar

import numpy as np

from kvferry.engines.seam import Outcome
from kvferry.testing.suite_base import FAILED, SuiteBase
from kvferry.testing.suite_pair import CLAIM, GUARD
from kvferry.testing.suite_process import EngineProcess

_ROW = 100_000
_STOPPED_S = 0.4


class PeerDeath(SuiteBase):
    """kill -9 before, during and after; SIGSTOP and SIGCONT; a restart under the same name."""

    group: ClassVar[str] = "peer_death"

    def test_attaching_to_a_process_that_was_killed_fails(self) -> None:
        """Its blob is good and nobody is behind it."""
        process = self.spawn(1 << 20)
        process.kill()
        done = self.settled_attach(process)
        assert done.outcome in FAILED
        assert done.cause
        assert self.write_to(process).outcome in FAILED
        self._others_are_served()

    def test_writing_to_a_process_that_was_killed_fails(self) -> None:
        """It never lands, and the outcome comes by itself."""
        process = self.spawn_target()
        assert self.write_to(process).outcome is Outcome.LANDED
        assert process.do("bytes", offset=0, nbytes=50)["bytes"] == self.pair.writer.pool[:50].tobytes().hex()
        process.kill()
        assert self.write_to(process).outcome in FAILED
        assert self.write_to(process).outcome in FAILED
        self._others_are_served()

    def test_each_ticket_ends_when_the_target_is_killed_in_the_middle(self) -> None:
        """None is lost, and a peer that lives is served meanwhile and afterwards."""
        process = self.spawn_target()
        assert self.pair.attach().outcome is Outcome.LANDED
        killer = threading.Timer(0.005, process.kill)
        tickets = [self._to(process) for _ in range(10)]
        killer.start()
        tickets += [self._to(process) for _ in range(20)]
        other = self.pair.submit(self.pair.batch([0], [0], [_ROW]))
        killer.join()
        tickets.append(self._to(process))
        assert self.pair.settle(other).outcome is Outcome.LANDED
        ended = self.settle_all(tickets)
        assert ended[-1].outcome in FAILED
        assert all(done.outcome is Outcome.LANDED or done.cause for done in ended)
        self._others_are_served()

    def test_a_writer_that_is_killed_leaves_the_target_to_its_other_peers(self) -> None:
        """It was in the middle of writing."""
        process = self.flooding()
        process.kill()
        self._others_are_served(expected_guard=False)

    def test_a_target_that_was_stopped_and_goes_on_has_all_bytes(self) -> None:
        """Being stopped is no failure: the tickets land when it runs again, or have landed before."""
        process = self.spawn_target()
        process.stop()
        resume = threading.Timer(_STOPPED_S, process.go_on)
        resume.start()
        tickets = [self.submit_to(process, [0], [at], [_ROW]) for at in range(0, 5 * _ROW, _ROW)]
        ended = self.settle_all(tickets)
        resume.join()
        assert [done.outcome for done in ended] == [Outcome.LANDED] * 5, ended
        there = process.do("bytes", offset=0, nbytes=5 * _ROW + 1)["bytes"]
        assert bytes.fromhex(there) == self.pair.writer.pool[:_ROW].tobytes() * 5 + bytes([GUARD])

    def test_a_writer_that_was_stopped_and_goes_on_lands_what_it_writes(self) -> None:
        """Where the target writes, it must not count as lost because it was silent."""
        process = self.flooding()
        process.stop()
        self.wait_until(lambda: False, _STOPPED_S)
        process.go_on()
        before = process.do("info")["rounds"]
        self.wait_until(lambda: bool(process.do("info")["rounds"] > before + 2))
        process.do("detach", peer=[self.pair.target.me.incarnation, 0])
        attached = process.attach(self.pair.target.me, self.pair.target.engine.describe())
        assert attached["outcome"] == Outcome.LANDED.value, attached
        answer = process.do("write", peer=[2, 0], claim=CLAIM, dst=self.pair.target.address, fill=0x33)
        assert answer["outcome"] == Outcome.LANDED.value, answer
        assert (self.pair.target.pool[: process.nbytes] == 0x33).all()

    def test_a_target_that_was_restarted_under_the_same_name_is_attached_anew(self) -> None:
        """What is written afterwards lands in the new process; the dead one's tickets stay failed."""
        process = self.spawn_target()
        assert self.write_to(process).outcome is Outcome.LANDED
        process.kill()
        assert self.write_to(process).outcome in FAILED
        again = self.spawn_target()
        assert again.peer == process.peer
        assert self.write_to(again).outcome is Outcome.LANDED
        expected = [*self.pair.writer.pool[:50].tolist(), GUARD]
        assert list(bytes.fromhex(again.do("bytes", offset=0, nbytes=51)["bytes"])) == expected

    def test_a_writer_that_was_restarted_under_the_same_name_is_let_in(self) -> None:
        """Unless a fence was asked for: that proof is about the name."""
        self.flooding().kill()
        again = self.spawn()
        attached = again.attach(self.pair.target.me, self.pair.target.engine.describe())
        assert attached["outcome"] == Outcome.LANDED.value, attached
        answer = again.do("write", peer=[2, 0], claim=CLAIM, dst=self.pair.target.address, fill=0x44)
        assert answer["outcome"] == Outcome.LANDED.value, answer
        assert (self.pair.target.pool[: again.nbytes] == 0x44).all()

    def _to(self, process: EngineProcess) -> int:
        return self.submit_to(process, [0], [0], [_ROW])

    def _others_are_served(self, *, expected_guard: bool = True) -> None:
        """The pair still works; the target's pool was untouched by what happened elsewhere."""
        pair = self.pair
        assert pair.attach().outcome is Outcome.LANDED
        assert pair.write(pair.batch([7], [pair.target.pool.nbytes - _ROW], [_ROW])).outcome is Outcome.LANDED
        assert np.array_equal(pair.target.pool[pair.target.pool.nbytes - _ROW :], pair.writer.pool[7 : 7 + _ROW])
        if expected_guard:
            assert (pair.target.pool[_ROW : pair.target.pool.nbytes - _ROW] == GUARD).all()
