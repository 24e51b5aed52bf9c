"""Bad days of NIXL: peers that stop, die and come again, deadlines of our own, forks."""

import gc
import os
import time

import numpy as np
import pytest
from nixl_pairs import a_pair, a_suite, attached, changed, short, submit

from engine_here import need
from kvferry.engines.host import Process
from kvferry.engines.seam import Outcome
from kvferry.errors import ForkError
from kvferry.testing.suite_pair import GUARD, wait_for

need("nixl")


@pytest.fixture
def pair():
    with a_pair() as made:
        yield made


@pytest.fixture
def suite(request):
    """Options as the parameter."""
    with a_suite(**getattr(request, "param", {})) as made:
        yield made


# peers that stop, die and come again


@short(transfer_timeout_s=0.3)
def test_a_stopped_target_runs_into_the_deadline_and_quiet_follows_when_it_goes_on(suite):
    process = attached(suite)
    process.stop()
    ticket = submit(suite, process)
    done = suite.pair.settle(ticket)
    assert (done.outcome, done.native) == (Outcome.FAILED_UNKNOWN, "deadline")
    assert "not over after 0.3 s" in done.cause
    assert suite.pair.writer.engine.info()["overdue"] == 1
    process.go_on()
    assert suite.pair.settle(ticket).outcome is Outcome.QUIET
    landed = bytes.fromhex(process.do("bytes", offset=0, nbytes=process.nbytes)["bytes"])
    assert landed == suite.pair.writer.pool[: process.nbytes].tobytes()
    assert suite.pair.writer.engine.info()["overdue"] == 0


@short(transfer_timeout_s=0.3)
def test_attaching_again_does_not_cut_a_write_whose_proof_is_awaited(suite):
    """The node attaches anew as soon as a write has failed."""
    process = attached(suite)
    process.stop()
    ticket = submit(suite, process)
    assert suite.pair.settle(ticket).outcome is Outcome.FAILED_UNKNOWN
    again = suite.pair.writer.engine.attach(process.peer, process.blob)
    process.go_on()
    assert suite.pair.settle(again).outcome is Outcome.LANDED
    assert suite.pair.settle(ticket).outcome is Outcome.QUIET
    assert suite.write_to(process).outcome is Outcome.LANDED


@pytest.mark.parametrize("host", ["the same", "another"])
def test_a_target_that_is_killed_in_mid_transfer_is_proven_quiet_by_its_end_on_the_same_host(suite, host):
    process = suite.spawn()
    if host == "another":
        process.blob = changed(process.blob, process=Process("another host", 1, 1))
    assert suite.settled_attach(process).outcome is Outcome.LANDED
    process.stop()
    ticket = submit(suite, process)
    assert suite.pair.step() == []
    process.kill()
    done = suite.pair.settle(ticket, 5)
    assert (done.outcome, done.native) == (Outcome.FAILED_UNKNOWN, "NIXL_ERR_REMOTE_DISCONNECT")
    assert "the connection is gone" in done.cause
    assert suite.pair.writer.engine.info()["in_flight"] == 0
    if host == "the same":
        assert suite.pair.settle(ticket, 5).outcome is Outcome.QUIET
    else:
        assert wait_for(suite.pair.writer.engine, ticket, 0.3) is None, "nobody has proven anything"


def test_a_transfer_that_failed_while_its_target_lives_has_no_proof_until_that_ends(suite, monkeypatch):
    process = attached(suite)
    with monkeypatch.context() as patch:

        def broken(_):
            raise RuntimeError("on purpose")

        patch.setattr(suite.pair.writer.engine._agent, "is_done", broken)
        patch.setattr(suite.pair.writer.engine._agent, "post", broken)
        ticket = submit(suite, process)
        assert suite.pair.settle(ticket).outcome is Outcome.FAILED_UNKNOWN
    assert wait_for(suite.pair.writer.engine, ticket, 0.3) is None
    process.stop()
    assert wait_for(suite.pair.writer.engine, ticket, 0.3) is None
    process.kill()
    assert wait_for(suite.pair.writer.engine, ticket, 5) is Outcome.QUIET


def test_rows_in_a_socket_land_after_the_end_of_their_writer(suite):
    """Why the end of a process alone is no proof, and a fence looks at the sockets besides."""
    pool = suite.pair.target.pool
    for _ in range(6):
        pool[:] = GUARD
        process = suite.flooding()
        time.sleep(0.5)  # nobody polls: the socket fills
        process.kill()
        before = pool.copy()
        time.sleep(0.1)
        assert np.array_equal(pool, before)
        suite.pair.target.engine.poll(0.1)
        if not np.array_equal(pool, before):
            return
        # UCX closes all of a peer's connections when it sees the end of one, in whichever order it looks at them
    pytest.fail("nothing landed")


def test_a_detach_lets_what_is_under_way_end(suite):
    process = attached(suite)
    process.stop()
    ticket = submit(suite, process)
    suite.pair.writer.engine.detach(process.peer)
    process.go_on()
    assert suite.pair.settle(ticket).outcome is Outcome.LANDED
    assert suite.write_to(process).outcome is Outcome.FAILED_QUIET


def test_a_peer_that_restarts_under_the_same_name_is_written_to_after_attaching_again(suite):
    process = attached(suite)
    process.kill()
    assert suite.write_to(process).outcome in {Outcome.FAILED_QUIET, Outcome.FAILED_UNKNOWN}
    assert suite.settled_attach(process).outcome is Outcome.FAILED_QUIET, "it is dead"
    again = attached(suite)
    assert again.peer == process.peer
    assert suite.write_to(again).outcome is Outcome.LANDED
    assert again.do("bytes", offset=0, nbytes=50)["bytes"] == suite.pair.writer.pool[:50].tobytes().hex()


def test_closing_with_a_write_under_way_ends_at_once(suite):
    process = attached(suite)
    process.stop()
    submit(suite, process)
    began = time.monotonic()
    suite.pair.writer.engine.close()
    assert time.monotonic() - began < 2.0


def test_a_library_that_raises_while_it_serves_peers_is_counted_and_nothing_ends(pair, monkeypatch):
    assert pair.attach().outcome is Outcome.LANDED
    agent = pair.target.engine._agent

    def broken():
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(agent, "progress", broken)
        pair.target.engine.poll(0)
        pair.target.engine.poll(0)
    assert pair.target.engine.info()["troubles"] == 2
    assert "on purpose" in pair.target.engine.info()["last_trouble"]
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED


# forks


def test_a_forked_child_can_not_use_it_and_does_not_harm_the_parent(suite):
    process = attached(suite)
    engine = suite.pair.writer.engine
    pid = os.fork()
    if not pid:
        code = 1
        try:
            engine.poll(0)
        except ForkError:
            engine.close()
            suite.pair = engine = None
            gc.collect()  # what frees an agent here makes UCX end the parent
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert suite.write_to(process).outcome is Outcome.LANDED
    engine.detach(process.peer)
    assert suite.settled_attach(process).outcome is Outcome.LANDED
    assert suite.write_to(process).outcome is Outcome.LANDED
