"""Large batches by cross-memory attach: agents beside the engine's own copy them, in parts, on threads of their own."""

import os
import threading
import time

import numpy as np
import pytest
from nixl_pairs import POOL, TCP, a_pair, attached, submit

from engine_here import need
from kvferry.engines.nixl import lane, lanes
from kvferry.engines.nixl.lanes import SPLIT_BYTES
from kvferry.engines.seam import Outcome, Region
from kvferry.testing.suite import EngineSuite
from kvferry.testing.suite_pair import GUARD

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


def lanes_of(pair):
    return pair.writer.engine._lanes


def has_lanes(pair, peer=None):
    found = pair.writer.engine._remotes.get(peer or pair.target.me)
    return bool(lanes_of(pair)._lanes) and all(each.reaches(found) for each in lanes_of(pair)._lanes)


def engaged(pair, peer=None, limit_s=10.0):
    """Poll both until the lanes have connected."""
    until = time.monotonic() + limit_s
    while not has_lanes(pair, peer):
        assert time.monotonic() < until, lanes_of(pair).info()
        pair.step()


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
    for seed in range(5):
        pair.target.pool[:] = GUARD
        batch, expected = rows(pair, seed)
        assert pair.write(batch).outcome is Outcome.LANDED
        assert np.array_equal(pair.target.pool, expected)
    assert len(seen) == 5 * lanes.PARTS * 2
    assert sum(nbytes for _, nbytes in seen) == 5 * batch.total_bytes
    assert {name for name, _ in seen} == {"kvferry-nixl-copy"}
    assert pair.writer.engine.info()["copy_threads"] == 2


def test_one_large_row_is_cut_and_small_batches_are_not(pair, monkeypatch):
    pair.write(rows(pair)[0])
    engaged(pair)
    seen = begun_asides(monkeypatch)
    pair.target.pool[:] = GUARD
    assert pair.write(pair.batch([3], [5], [POOL - 5])).outcome is Outcome.LANDED
    assert (pair.target.pool[5:] == pair.writer.pool[3:-2]).all()
    assert (pair.target.pool[:5] == GUARD).all()
    assert len(seen) == lanes.PARTS * 2
    assert pair.write(pair.batch([0], [0], [SPLIT_BYTES - 1])).outcome is Outcome.LANDED
    assert len(seen) == lanes.PARTS * 2


def test_many_batches_at_once_and_each_has_landed_when_it_is_said(pair):
    pair.write(rows(pair)[0])
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
    pair.write(rows(pair)[0])
    engaged(pair)
    other = np.random.default_rng(9).integers(0, 256, POOL, np.uint8)
    pair.writer.engine.register([Region(other.ctypes.data, POOL)])
    pair.writer.pool = other
    batch, expected = rows(pair, 4)
    pair.target.pool[:] = GUARD
    assert pair.write(batch).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool, expected)


def test_a_peer_that_was_left_and_attached_anew_is_connected_to_anew(pair):
    pair.write(rows(pair)[0])
    engaged(pair)
    pair.writer.engine.detach(pair.target.me)
    assert pair.write(rows(pair)[0]).outcome is Outcome.FAILED_QUIET
    assert pair.attach().outcome is Outcome.LANDED
    assert not has_lanes(pair)
    batch, expected = rows(pair, 2)
    for _ in range(2):
        pair.target.pool[:] = GUARD
        assert pair.write(batch).outcome is Outcome.LANDED
        assert np.array_equal(pair.target.pool, expected)
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
    for _ in range(3):
        pair.target.pool[:] = GUARD
        assert pair.write(batch).outcome is Outcome.LANDED
        assert np.array_equal(pair.target.pool, expected)
        for _ in range(20):
            pair.step()
    assert not has_lanes(pair)
    assert "on purpose" in pair.writer.engine.info()["copy_problem"]
    assert caplog.text.count("copies with one thread: RuntimeError: on purpose") == 2


def test_no_thread_is_to_be_had_and_the_engine_copies_alone(pair, monkeypatch, caplog):
    def refused(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert pair.write(rows(pair)[0]).outcome is Outcome.LANDED
    assert pair.write(rows(pair)[0]).outcome is Outcome.LANDED
    assert "can't start new thread" in pair.writer.engine.info()["copy_problem"]
    assert "copies with one thread: can't start new thread" in caplog.text


def test_a_part_that_can_not_be_made_fails_the_batch_without_a_proof(pair, monkeypatch):
    pair.write(rows(pair)[0])
    engaged(pair)

    def broken(*_):
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(lane.Lane, "write", broken)
        done = pair.write(rows(pair)[0])
    assert (done.outcome, done.cause) == (Outcome.FAILED_UNKNOWN, "RuntimeError: on purpose")
    assert pair.attach().outcome is Outcome.LANDED, "as the node does after a failure"
    batch, expected = rows(pair, 3)
    for _ in range(2):
        pair.target.pool[:] = GUARD
        assert pair.write(batch).outcome is Outcome.LANDED
        assert np.array_equal(pair.target.pool, expected)
        engaged(pair)


def test_it_is_closed_while_the_agents_are_being_made(pair, monkeypatch):
    made, original, begin = [], lanes_of(pair)._make, threading.Event()

    def slow():
        begin.set()
        time.sleep(0.2)
        made.append(original())
        return made[-1]

    monkeypatch.setattr(lanes_of(pair), "_make", slow)
    assert pair.write(rows(pair)[0]).outcome is Outcome.LANDED
    assert begin.wait(5)
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
    engaged(suite.pair, peer)
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
        engaged(suite.pair, again.peer)
    landed = bytes.fromhex(again.do("bytes", offset=0, nbytes=again.nbytes)["bytes"])
    assert landed == suite.pair.writer.pool[: again.nbytes].tobytes()
