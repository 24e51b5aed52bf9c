"""Large batches by cross-memory attach: agents beside the engine's own copy them, in parts, on threads of their own."""

import itertools
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from nixl_pairs import POOL, TCP, a_pair, attached, submit

from engine_here import need
from kvferry.engines.nixl import lane
from kvferry.engines.nixl.agent import Agent
from kvferry.engines.nixl.peers import Peers
from kvferry.engines.rows import SPLIT_BYTES
from kvferry.engines.seam import Caps, Outcome, Region
from kvferry.errors import EngineError, WireError
from kvferry.testing.suite import EngineSuite
from kvferry.testing.suite_pair import GUARD, wait_for

need("nixl")

TWO = {"copy_threads": "2"}


@pytest.fixture
def pair():
    with a_pair(**TWO) as made:
        assert made.attach().outcome is Outcome.LANDED
        yield made


def rows(pair, seed=0, size=65536 - 24):
    """Shuffled rows of an odd size, all of the pool but the gaps, and which bytes of the target they fill."""
    random = np.random.default_rng(seed)
    count = POOL // 65536
    src, dst = random.permutation(count) * 65536, random.permutation(count) * 65536 + 8
    batch = pair.batch(src, dst, [size] * count)
    expected = np.full(POOL, GUARD, np.uint8)
    for here, there in zip(src, dst, strict=True):
        expected[there : there + size] = pair.writer.pool[here : here + size]
    return batch, expected


def lands_whole(pair, batch, expected):
    pair.target.pool[:] = GUARD
    assert pair.write(batch).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool, expected)
    return batch


def lanes_of(pair):
    return pair.writer.engine._lanes


def has_lanes(pair, peer=None):
    found = pair.writer.engine._remotes.get(peer or pair.target.me)
    return bool(lanes_of(pair)._lanes) and all(each.reaches(found) for each in lanes_of(pair)._lanes)


def engaged(pair, again=None, peer=None, limit_s=10.0):
    """Write large batches until the lanes have connected; the first ones on a connection may take two steps."""
    until = time.monotonic() + limit_s
    again = again or (lambda: pair.write(rows(pair)[0]))
    while not has_lanes(pair, peer):
        assert time.monotonic() < until, lanes_of(pair).info()
        assert again().outcome is Outcome.LANDED
        pair.step()


def written_until(pair, condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        assert pair.write(rows(pair)[0]).outcome is Outcome.LANDED


def begun_asides(monkeypatch):
    seen = []
    original = lane.Lane.write

    def write(self, peer, here, there):
        seen.append((threading.current_thread().name, int(here.table[:, 1].sum())))
        return original(self, peer, here, there)

    monkeypatch.setattr(lane.Lane, "write", write)
    return seen


def test_the_first_large_batch_is_copied_alone_and_later_ones_in_parts_with_every_row_in_its_place(pair, monkeypatch):
    seen = begun_asides(monkeypatch)
    batch, _ = rows(pair)
    assert pair.write(batch).outcome is Outcome.LANDED
    assert seen == []
    engaged(pair)
    seen.clear()
    for seed in range(5):
        batch = lands_whole(pair, *rows(pair, seed))
    assert len(seen) == 5 * 2
    assert sum(nbytes for _, nbytes in seen) == 5 * batch.total_bytes
    assert {name for name, _ in seen} == {"kvferry-nixl-copy"}
    assert pair.writer.engine.info()["copy_threads"] == 2


def test_one_large_row_is_cut_and_small_batches_are_not(pair, monkeypatch):
    engaged(pair)
    seen = begun_asides(monkeypatch)
    pair.target.pool[:] = GUARD
    assert pair.write(pair.batch([3], [5], [POOL - 5])).outcome is Outcome.LANDED
    assert (pair.target.pool[5:] == pair.writer.pool[3:-2]).all()
    assert (pair.target.pool[:5] == GUARD).all()
    assert len(seen) == 2
    assert pair.write(pair.batch([0], [0], [SPLIT_BYTES - 1])).outcome is Outcome.LANDED
    assert len(seen) == 2


def test_many_batches_at_once_and_each_has_landed_when_it_is_said(pair):
    engaged(pair)
    size = POOL // 4
    for turn in range(10):
        pair.target.pool[:] = GUARD
        order = np.random.default_rng(turn).permutation(4) * size
        tickets = {pair.submit(pair.batch([at], [at], [size])): int(at) for at in order}
        while tickets:
            for done in pair.step():
                at = tickets.pop(done.ticket)
                assert done.outcome is Outcome.LANDED
                assert np.array_equal(pair.target.pool[at : at + size], pair.writer.pool[at : at + size])


def test_memory_that_was_registered_anew_is_copied_from(pair):
    engaged(pair)
    other = np.random.default_rng(9).integers(0, 256, POOL, np.uint8)
    pair.writer.engine.register([Region(other.ctypes.data, POOL)])
    pair.writer.pool = other
    lands_whole(pair, *rows(pair, 4))


def test_a_peer_that_was_left_and_attached_anew_is_connected_to_anew(pair):
    engaged(pair)
    pair.writer.engine.detach(pair.target.me)
    assert pair.write(rows(pair)[0]).outcome is Outcome.FAILED_QUIET
    assert pair.attach().outcome is Outcome.LANDED
    assert not has_lanes(pair)
    batch, expected = rows(pair, 2)
    for _ in range(2):
        lands_whole(pair, batch, expected)
        engaged(pair)


def test_by_tcp_the_library_returns_before_it_is_over_and_no_lane_is_made():
    with a_pair(**TCP, **TWO) as made:
        assert made.attach().outcome is Outcome.LANDED
        for _ in range(3):
            assert made.write(rows(made)[0]).outcome is Outcome.LANDED
        assert made.writer.engine.info()["copy_threads"] == 1
        assert not lanes_of(made)._lanes


def test_one_thread_is_asked_for_and_there_is_no_other():
    with a_pair(copy_threads="1") as made:
        assert made.attach().outcome is Outcome.LANDED
        before = threading.active_count()
        for _ in range(3):
            assert made.write(rows(made)[0]).outcome is Outcome.LANDED
        assert threading.active_count() == before


def test_a_further_agent_that_can_not_be_made_costs_nothing_but_speed(pair, monkeypatch, caplog):
    def broken():
        raise RuntimeError("on purpose")

    monkeypatch.setattr(lanes_of(pair), "_make", broken)
    batch, expected = rows(pair)
    written_until(pair, lambda: pair.writer.engine.info()["copy_problem"])
    lands_whole(pair, batch, expected)
    assert not has_lanes(pair)
    assert "on purpose" in pair.writer.engine.info()["copy_problem"]
    assert "copies with one thread: RuntimeError: on purpose" in caplog.text


def test_no_thread_is_to_be_had_and_the_engine_copies_alone(pair, monkeypatch, caplog):
    def refused(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        written_until(pair, lambda: pair.writer.engine.info()["copy_problem"])
    assert pair.write(rows(pair)[0]).outcome is Outcome.LANDED
    assert "can't start new thread" in pair.writer.engine.info()["copy_problem"]
    assert "copies with one thread: can't start new thread" in caplog.text


def test_a_part_that_can_not_be_made_fails_the_batch_without_a_proof(pair, monkeypatch):
    engaged(pair)

    def broken(*_):
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(lane.Lane, "write", broken)
        done = pair.write(rows(pair)[0])
    assert (done.outcome, done.cause) == (Outcome.FAILED_UNKNOWN, "RuntimeError: on purpose")
    assert not pair.writer.engine.info()["in_flight"]
    assert pair.attach().outcome is Outcome.LANDED, "as the node does after a failure"
    batch, expected = rows(pair, 3)
    for _ in range(2):
        lands_whole(pair, batch, expected)
        engaged(pair)


def test_a_failure_is_told_when_the_other_parts_are_over_so_that_the_peer_can_be_attached_anew(pair, monkeypatch):
    engaged(pair)
    original, turn = lane.Lane.write, itertools.count()

    def first_fails(self, *rest):
        if next(turn) == 0:
            raise RuntimeError("on purpose")
        time.sleep(0.05)
        return original(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(lane.Lane, "write", first_fails)
        done = pair.write(rows(pair)[0])
        assert done.outcome is Outcome.FAILED_UNKNOWN
        assert next(turn) == 2
        assert pair.attach().outcome is Outcome.LANDED


def test_memory_is_registered_anew_when_what_is_being_copied_has_been(pair, monkeypatch):
    """The library does not look after a transfer that is made and not begun."""
    engaged(pair)
    original, go, came = lane.Lane.write, threading.Event(), threading.Event()

    def held(self, *rest):
        made = original(self, *rest)
        came.set()
        assert go.wait(10)
        return made

    monkeypatch.setattr(lane.Lane, "write", held)
    pair.target.pool[:] = GUARD
    batch, expected = rows(pair, 6)
    ticket = pair.submit(batch)
    assert came.wait(5)
    anew = threading.Thread(
        target=pair.writer.engine.register,
        args=([Region(pair.writer.address, POOL), Region(batch.src.ctypes.data, 8)],),
    )
    anew.start()
    anew.join(0.2)
    assert anew.is_alive()
    go.set()
    anew.join(5)
    assert not anew.is_alive()
    assert pair.settle(ticket).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool, expected)


def test_what_can_not_be_registered_leaves_nothing_registered_and_the_next_does(pair):
    engaged(pair)
    engine = pair.writer.engine
    with pytest.raises(EngineError, match="can't be registered"):
        engine.register([Region(pair.writer.address, POOL), Region(pair.writer.address, 4096, 3)])
    assert pair.write(rows(pair)[0]).outcome is Outcome.FAILED_QUIET
    engine.register([Region(pair.writer.address, POOL)])
    lands_whole(pair, *rows(pair, 7))


def test_a_fence_lands_when_the_writer_closed_with_copies_that_nobody_had_collected(pair):
    """The process lives on: it is the farewell, after the last part, that the target goes by."""
    engaged(pair)
    for _ in range(3):
        assert pair.write(rows(pair)[0]).outcome is Outcome.LANDED
    for _ in range(4):
        pair.submit(rows(pair)[0])
    pair.writer.engine.close()
    before = pair.target.pool.copy()
    target = pair.target.engine
    assert Caps.FENCE in target.caps
    assert wait_for(target, target.fence(pair.writer.me), 5) is Outcome.LANDED
    assert np.array_equal(pair.target.pool, before)


def test_who_finds_no_place_is_connected_to_later(pair, monkeypatch):
    original, refused = Agent.take_slot, []

    def none_at_first(self):
        if self is not pair.writer.engine._agent and len(refused) < 5:
            refused.append(self)
            return None
        return original(self)

    monkeypatch.setattr(Agent, "take_slot", none_at_first)
    engaged(pair)
    assert len(refused) == 5


def test_a_connection_that_could_not_be_made_is_tried_again_with_the_next_large_batch(pair, monkeypatch):
    original, refused = Peers.load, []

    def refused_at_first(self, said, in_use):
        if len(refused) < 2:
            refused.append(self)
            raise WireError("on purpose")
        return original(self, said, in_use)

    monkeypatch.setattr(Peers, "load", refused_at_first)
    engaged(pair)
    assert len(refused) == 2
    assert pair.writer.engine.info()["copy_peers"] == 1


def test_a_library_that_raises_while_an_agent_is_idle_costs_nothing(pair, monkeypatch):
    engaged(pair)

    def broken():
        raise RuntimeError("on purpose")

    for each in lanes_of(pair)._lanes:
        monkeypatch.setattr(each._agent, "progress", broken)
        each._progress_at = 0.0
    pair.step()
    assert has_lanes(pair)
    assert pair.write(rows(pair)[0]).outcome is Outcome.LANDED


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_that_ends_while_its_threads_copy_ends_with_its_own_code(closes):
    code = """
import sys, threading, time
from nixl_pairs import POOL, build
pair = build(copy_threads="2")
pair.attach()
batch = pair.batch([0], [0], [POOL])
until = time.monotonic() + 10
while not pair.writer.engine.info()["copy_peers"] and time.monotonic() < until:
    pair.write(batch)
    pair.step()
for _ in range(8):
    pair.submit(batch)
if sys.argv[1] == "True":
    pair.close()
sys.exit(3)
"""
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-c", code, str(closes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert ended.returncode == 3, ended.stderr


def test_it_is_closed_while_the_agents_are_being_made(pair, monkeypatch):
    made, original, begin = [], lanes_of(pair)._make, threading.Event()

    def slow():
        begin.set()
        time.sleep(0.2)
        made.append(original())
        return made[-1]

    monkeypatch.setattr(lanes_of(pair), "_make", slow)
    written_until(pair, begin.is_set)
    pair.writer.engine.close()
    assert made
    assert all(agent._native is None for agent in made)


def test_threads_and_descriptors_are_given_back():
    def used():
        return sorted(os.listdir("/proc/self/fd")), threading.active_count()

    def cycle():
        with a_pair(**TWO) as made:
            assert made.attach().outcome is Outcome.LANDED
            assert made.write(rows(made)[0]).outcome is Outcome.LANDED
            engaged(made)
            assert made.write(rows(made)[0]).outcome is Outcome.LANDED

    cycle()
    descriptors, threads = used()
    for _ in range(5):
        cycle()
    assert len(used()[0]) <= len(descriptors)
    assert used()[1] == threads


@pytest.fixture
def suite():
    made = EngineSuite()
    made.engine_name, made.options = "nixl", TWO
    made.setup_method()
    yield made
    made.teardown_method()


def whole(suite, process):
    return suite.pair.settle(submit(suite, process))


def test_a_target_that_is_killed_while_the_threads_copy_is_proven_by_its_end_and_others_are_written_to(
    suite, monkeypatch
):
    process = attached(suite)
    assert whole(suite, process).outcome is Outcome.LANDED
    peer = process.peer
    engaged(suite.pair, lambda: whole(suite, process), peer)
    original, killed = lane.Lane.write, threading.Event()

    def late(self, name, here, there):
        if not killed.is_set():
            process.kill()
            killed.set()
        return original(self, name, here, there)

    monkeypatch.setattr(lane.Lane, "write", late)
    ticket = submit(suite, process)
    done = suite.pair.settle(ticket)
    assert done.outcome is Outcome.FAILED_UNKNOWN
    assert suite.pair.settle(ticket).outcome is Outcome.QUIET
    again = attached(suite)
    for _ in range(2):
        assert whole(suite, again).outcome is Outcome.LANDED
        engaged(suite.pair, lambda: whole(suite, again), again.peer)
    landed = bytes.fromhex(again.do("bytes", offset=0, nbytes=again.nbytes)["bytes"])
    assert landed == suite.pair.writer.pool[: again.nbytes].tobytes()
