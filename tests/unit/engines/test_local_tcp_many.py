"""Many peers by TCP: what each costs, and what is said when no descriptor is left."""

import contextlib
import os
import resource
import threading

import numpy as np
from tcp_caller import MIB, TCP, assert_still_works, link_to, wait_until, whole_pool

from kvferry.engines.local import LocalEngine, tcp_link
from kvferry.engines.seam import Outcome
from kvferry.ids import PeerId
from kvferry.testing.suite_pair import Pair, open_end


def test_many_peers_cost_no_threads_and_one_descriptor_at_each_end(pair):
    count = 100
    assert pair.attach().outcome is Outcome.LANDED
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    peers = [PeerId(2, epoch) for epoch in range(1, count + 1)]
    for peer in peers:
        said = pair.target.engine.personal(pair.target.engine.describe(), peer.epoch)
        done = pair.settle(pair.writer.engine.attach(peer, said))
        assert done.outcome is Outcome.LANDED
        pair.target.grant(PeerId(1, peer.epoch))
    for peer in peers:
        at = peer.epoch * 1000
        assert pair.settle(pair.writer.engine.submit(peer, pair.batch([at], [at], [1000]))).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool[1000 : 1000 * (count + 1)], pair.writer.pool[1000 : 1000 * (count + 1)])
    # the second thread with its two descriptors is started when the first peer falls to it
    assert threading.active_count() <= threads + 1
    assert 0 <= len(os.listdir("/proc/self/fd")) - descriptors - 2 * count <= 2


def test_attachments_of_several_connections_leave_no_thread_and_no_descriptor(monkeypatch):
    monkeypatch.setattr(tcp_link, "MUCH_BYTES", 1)

    most = []

    def cycle():
        pair = Pair(*[open_end(LocalEngine(), number, 8 * MIB, {**TCP, "tcp_connections": "3"}) for number in (1, 2)])
        with contextlib.closing(pair):
            for _ in range(2):
                assert pair.attach().outcome is Outcome.LANDED
                tickets = [pair.writer.engine.submit(pair.target.me, whole_pool(pair)) for _ in range(8)]
                assert all(pair.settle(ticket).outcome is Outcome.LANDED for ticket in tickets)
                most.append(len(link_to(pair)._connections))
            pair.writer.engine.submit(pair.target.me, whole_pool(pair))  # is on its way when all is closed

    def left():
        return sorted(os.listdir("/proc/self/fd")), threading.active_count()

    cycle()
    before = left()
    for _ in range(10):
        cycle()
    wait_until(lambda: left() == before)
    assert max(most) > 1, "more are opened when the first one is late, which is not each time"


def test_a_target_without_descriptors_says_so_and_lets_in_again_later(suite):
    process = suite.spawn(4096, ("sh", "-c", 'ulimit -n 40; exec "$@"', "sh"))
    engine, peers = suite.pair.writer.engine, [PeerId(99, epoch) for epoch in range(1, 41)]
    said = {peer: engine.personal(process.blob, peer.epoch) for peer in peers}
    ended = {peer: suite.pair.settle(engine.attach(peer, said[peer])) for peer in peers}
    let_in = [peer for peer in peers if ended[peer].outcome is Outcome.LANDED]
    assert 5 < len(let_in) < 38
    for peer in peers[len(let_in) :]:
        assert ended[peer].outcome is Outcome.FAILED_QUIET
        assert "the target can open no more connections (EMFILE; at most 40 open files)" in ended[peer].cause
        assert "ulimit -n" in ended[peer].cause
    engine.detach(let_in[0])
    wait_until(lambda: suite.settled_attach(process).outcome is Outcome.LANDED)
    assert engine.explain(process.peer).startswith("tcp (ready)")


def test_a_writer_without_descriptors_says_so_and_goes_on_when_there_are_some(pair, few_descriptors):
    blob_of_target, before = pair.target.engine.describe(), resource.getrlimit(resource.RLIMIT_NOFILE)
    few_descriptors(0)
    done = pair.settle(pair.writer.engine.attach(pair.target.me, blob_of_target))
    assert done.outcome is Outcome.FAILED_QUIET
    assert "this process can open no more connections (EMFILE" in done.cause
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert_still_works(pair)


def test_one_connection_is_done_with_when_there_is_no_descriptor_for_another(pair, few_descriptors):
    assert pair.attach().outcome is Outcome.LANDED
    few_descriptors(0)
    tickets = [pair.writer.engine.submit(pair.target.me, whole_pool(pair)) for _ in range(10)]
    assert all(pair.settle(ticket).outcome is Outcome.LANDED for ticket in tickets)
    assert len(link_to(pair)._connections) == 1


def test_a_target_with_one_descriptor_left_takes_the_first_connection_and_refuses_what_it_can_not_serve(
    few_descriptors,
):
    pair = Pair(*[open_end(LocalEngine(), number, 8 * MIB, TCP) for number in (1, 2)])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for count in range(1, 9):  # socket, accepted socket, spare, thread of the lane: one after the other is missing
        few_descriptors(count)
        done = pair.attach()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        if done.outcome is Outcome.LANDED:
            break
        assert "can open no more connections (EMFILE" in done.cause
    assert done.outcome is Outcome.LANDED
    assert count > 2
    assert pair.write(whole_pool(pair)).outcome is Outcome.LANDED
    pair.close()
