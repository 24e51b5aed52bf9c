"""What fails over Mooncake, what it costs others, and when it is proven that nothing lands any more."""

import time

import pytest
from mooncake_here import MIB, memory_of, opened, with_process

from engine_here import need
from kvferry.engines.mooncake import instance, quiet
from kvferry.engines.seam import Outcome
from kvferry.ids import PeerId
from kvferry.plan.batch import Limits

need("mooncake")


@pytest.fixture
def suite():
    yield from opened()


@pytest.fixture
def attached(suite):
    return with_process(suite)


def test_rows_outside_of_what_the_target_has_registered_fail_and_become_quiet(attached):
    suite, process = attached
    ticket = suite.submit(process, 4, first=process.nbytes - MIB)
    done = suite.pair.settle(ticket)
    assert (done.outcome, done.native) == (Outcome.FAILED_UNKNOWN, "-1")
    assert "write of 4 rows" in done.cause
    refused = suite.write_to(process)
    assert refused.outcome is Outcome.FAILED_QUIET
    assert "since a write to it failed" in refused.cause
    again = suite.engine.attach(process.peer, process.blob)
    assert suite.quiet(ticket)
    assert suite.pair.settle(again).outcome is Outcome.LANDED
    assert suite.write_to(process).outcome is Outcome.LANDED
    assert suite.engine.info()["rebuilds"] == 1
    assert suite.engine.info()["unproven"] == 0


def test_a_peer_that_is_killed_under_a_call_costs_the_batches_of_that_call(attached):
    suite, process = attached
    other = suite.pair
    assert other.attach().outcome is Outcome.LANDED
    tickets = [suite.submit(process) for _ in range(20)]
    time.sleep(0.02)
    process.kill()
    outcomes = [other.settle(ticket).outcome for ticket in tickets]
    failed = outcomes.index(Outcome.FAILED_UNKNOWN)
    assert set(outcomes[:failed]) <= {Outcome.LANDED}
    unknown = outcomes.count(Outcome.FAILED_UNKNOWN)
    assert 1 <= unknown <= 4  # 64 MiB go together
    assert set(outcomes[failed : failed + unknown]) == {Outcome.FAILED_UNKNOWN}
    assert set(outcomes[failed + unknown :]) <= {Outcome.FAILED_QUIET}
    assert all(suite.quiet(ticket) for ticket in tickets[failed : failed + unknown])
    assert other.write(other.batch([0], [0], [10])).outcome is Outcome.LANDED


def test_destroying_the_instance_of_a_stopped_peer_proves_nothing(attached):
    """Why there is no QUIET yet: its rows lie in the kernel, and the peer writes them when it goes on."""
    suite, process = attached
    process.stop()
    began = time.monotonic()
    done = suite.pair.settle(suite.submit(process), 30)
    assert done.outcome is Outcome.FAILED_UNKNOWN
    assert time.monotonic() - began >= 5
    time.sleep(1)
    before = memory_of(process)
    process.go_on()
    time.sleep(1)
    assert memory_of(process) != before


def test_a_stopped_peer_is_quiet_only_after_it_went_on_and_then_nothing_lands(attached):
    """Its pool is read from outside at the moment of QUIET, and compared after some seconds."""
    suite, process = attached
    other = suite.pair
    assert other.attach().outcome is Outcome.LANDED
    process.stop()
    ticket = suite.submit(process, 4, 4 * MIB)
    assert other.write(other.batch([0], [0], [10])).outcome is Outcome.LANDED
    assert other.settle(ticket, 30).outcome is Outcome.FAILED_UNKNOWN
    again = suite.engine.attach(process.peer, process.blob)
    with pytest.raises(TimeoutError):
        other.settle(ticket, 2)
    assert other.write(other.batch([0], [0], [10])).outcome is Outcome.LANDED
    process.go_on()
    assert suite.quiet(ticket)
    before = memory_of(process)
    assert other.settle(again).outcome is Outcome.LANDED
    time.sleep(3)
    assert memory_of(process) == before
    assert suite.write_to(process).outcome is Outcome.LANDED


def test_what_failed_in_one_epoch_is_proven_in_the_next(attached):
    suite, process = attached
    ticket = suite.submit(process, 4, first=process.nbytes - MIB)
    assert suite.pair.settle(ticket).outcome is Outcome.FAILED_UNKNOWN
    suite.engine.detach(process.peer)
    again = suite.engine.attach(PeerId(process.peer.incarnation, 1), process.blob)
    assert suite.quiet(ticket)
    assert suite.pair.settle(again).outcome is Outcome.LANDED


def test_attaching_to_a_stopped_peer_ends_in_time_and_works_when_it_went_on(suite, monkeypatch):
    monkeypatch.setattr("kvferry.engines.mooncake.engine.ATTACH_S", -4.0)
    process = suite.spawn(MIB)
    process.stop()
    done = suite.settled_attach(process)
    assert (done.outcome, done.native) == (Outcome.FAILED_QUIET, "deadline")
    assert "no answer within 1 s" in done.cause
    monkeypatch.undo()
    ticket = suite.engine.attach(process.peer, process.blob)
    process.go_on()
    assert suite.pair.settle(ticket).outcome is Outcome.LANDED
    assert suite.write_to(process).outcome is Outcome.LANDED


def test_an_instance_that_was_wedged_by_too_many_rows_is_replaced(attached, monkeypatch):
    """What the limit protects from; the rows that are written after the failure end with the instance."""
    suite, process = attached
    monkeypatch.setattr(suite.engine, "limits", Limits(16384, 64 * MIB))
    ticket = suite.submit(process, 16384, 1024)
    assert suite.pair.settle(ticket, 30).outcome is Outcome.FAILED_UNKNOWN
    again = suite.engine.attach(process.peer, process.blob)
    assert suite.quiet(ticket)
    before = memory_of(process)
    assert suite.pair.settle(again).outcome is Outcome.LANDED
    time.sleep(2)
    assert memory_of(process) == before
    assert suite.pair.settle(suite.submit(process, 1024, 4096)).outcome is Outcome.LANDED


def test_without_the_kernels_word_there_is_no_proof(attached, monkeypatch):
    suite, process = attached
    monkeypatch.setattr("kvferry.engines.mooncake.quiet.unacknowledged", lambda _: None)
    ticket = suite.submit(process, 4, first=process.nbytes - MIB)
    assert suite.pair.settle(ticket).outcome is Outcome.FAILED_UNKNOWN
    assert suite.settled_attach(process).outcome is Outcome.LANDED
    assert suite.engine.info()["unproven"] == 1
    with pytest.raises(TimeoutError):
        suite.pair.settle(ticket, 0.5)


def test_closing_while_a_call_is_blocked_takes_two_seconds_and_the_thread_ends_later(attached):
    suite, process = attached
    process.stop()
    suite.submit(process)
    peer = suite.engine._peers[process.peer]
    time.sleep(0.1)
    began = time.monotonic()
    suite.engine.close()
    assert 1.5 < time.monotonic() - began < 5
    assert peer.alive
    process.go_on()
    peer.join(10)
    assert not peer.alive


def test_a_batch_that_waits_behind_another_is_refused_when_its_peer_is_detached(attached):
    suite, process = attached
    process.stop()
    tickets = [suite.submit(process)]
    time.sleep(0.2)  # it is with the library, those that follow wait
    tickets += [suite.submit(process) for _ in range(2)]
    suite.engine.detach(process.peer)
    process.go_on()
    outcomes = [suite.pair.settle(ticket).outcome for ticket in tickets]
    assert outcomes == [Outcome.LANDED, Outcome.FAILED_QUIET, Outcome.FAILED_QUIET]


@pytest.fixture
def calls(monkeypatch):
    """How many batches each call of the library had."""
    found, write = [], instance.Instance.write
    monkeypatch.setattr(
        instance.Instance, "write", lambda self, to, some: (found.append(len(some)), write(self, to, some))[1]
    )
    return found


def test_batches_that_wait_go_together_and_each_has_its_outcome(attached, calls):
    suite, process = attached
    process.stop()
    tickets = [suite.submit(process)]
    time.sleep(0.2)
    tickets += [suite.submit(process) for _ in range(3)]
    process.go_on()
    assert [suite.pair.settle(ticket).outcome for ticket in tickets] == [Outcome.LANDED] * 4
    assert calls == [1, 3]


def test_no_more_go_together_than_the_library_takes(attached, calls, monkeypatch):
    suite, process = attached
    monkeypatch.setattr(quiet, "LIMITS", Limits(rows=2, bytes=16 << 20))
    process.stop()
    tickets = [suite.submit(process)]
    time.sleep(0.2)
    tickets += [suite.submit(process, 1) for _ in range(3)]
    process.go_on()
    assert [suite.pair.settle(ticket).outcome for ticket in tickets] == [Outcome.LANDED] * 4
    assert calls == [1, 2, 1]


def test_batches_that_fail_together_are_all_unknown(attached, monkeypatch):
    suite, process = attached
    process.stop()
    first = suite.submit(process)
    time.sleep(0.2)
    monkeypatch.setattr(instance.Instance, "write", lambda *_: -1)
    others = [suite.submit(process) for _ in range(2)]
    process.go_on()
    assert suite.pair.settle(first).outcome is Outcome.LANDED
    assert [suite.pair.settle(ticket).outcome for ticket in others] == [Outcome.FAILED_UNKNOWN] * 2
    assert suite.engine.info()["rebuilds"] == 1


def test_whatever_the_library_raises_concerns_one_peer(attached, monkeypatch):
    suite, process = attached
    monkeypatch.setattr(instance.Instance, "write", lambda *_: 1 / 0)
    done = suite.write_to(process)
    assert (done.outcome, done.native) == (Outcome.FAILED_UNKNOWN, "ZeroDivisionError")
    monkeypatch.undo()
    assert suite.settled_attach(process).outcome is Outcome.LANDED
    assert suite.write_to(process).outcome is Outcome.LANDED


def test_a_write_that_failed_is_never_called_quiet_because_no_descriptor_was_left_to_end_its_instance(
    attached, monkeypatch
):
    suite, process = attached

    def none_left(port):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(instance, "wake_listener", none_left)
    ticket = suite.submit(process, 4, first=process.nbytes - MIB)
    assert suite.pair.settle(ticket).outcome is Outcome.FAILED_UNKNOWN
    assert suite.engine.info()["unproven"] == 1
    again = suite.engine.attach(process.peer, process.blob)
    assert suite.quiet(ticket)
    assert suite.pair.settle(again).outcome is Outcome.LANDED
