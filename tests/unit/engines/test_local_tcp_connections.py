"""One attachment over several TCP connections: they are opened when needed, and stand and fall together."""

import os
import secrets
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tcp_caller import (
    MIB,
    STRANGER,
    TCP,
    assert_closed,
    assert_still_works,
    auth,
    caller_of,
    greeted,
    half_a_batch,
    knock,
    link_to,
    read_reply,
    slow_pair,
    wait_until,
    whole_pool,
)

from kvferry.engines.grants import GrantTable
from kvferry.engines.local import LocalEngine, frames, tcp_link, writers
from kvferry.engines.seam import Batch, EngineConfig, Outcome, Region
from kvferry.errors import ConfigError
from kvferry.testing.suite_pair import Pair, open_end, wait_for

FAILED = (Outcome.FAILED_QUIET, Outcome.FAILED_UNKNOWN)


def submit_until_joined(pair, peer=None, address=None, count=2):
    """Submit 4 MiB batches until there are so many connections; returns their tickets."""
    peer, tickets = peer or pair.target.me, []
    until = time.monotonic() + 20
    while sum(one.state.value == "ready" for one in link_to(pair, peer)._connections) < count:
        assert time.monotonic() < until, "no further connection was opened"
        while len(set(tickets) - set(pair.ended)) < 10:
            tickets.append(pair.writer.engine.submit(peer, whole_pool(pair, address)))
        pair.step()
    return tickets


def receiving_threads():
    return sum(thread.name.startswith("kvferry-local-receive") for thread in threading.enumerate())


def spawned_target(suite):
    process = suite.spawn()
    process.do("grant", peer=[1, 0], claim=7)
    assert suite.settled_attach(process).outcome is Outcome.LANDED
    return process


def test_the_second_connection_is_opened_when_there_is_much_to_send(pair):
    assert pair.attach().outcome is Outcome.LANDED
    for _ in range(20):
        assert pair.write(pair.batch([0], [0], [100_000])).outcome is Outcome.LANDED
    assert len(link_to(pair)._connections) == 1
    tickets = submit_until_joined(pair)
    tickets += [pair.writer.engine.submit(pair.target.me, whole_pool(pair)) for _ in range(6)]
    assert all(one.unanswered for one in link_to(pair)._connections)
    assert all(pair.settle(ticket).outcome is Outcome.LANDED for ticket in tickets)
    assert not any(one.unanswered for one in link_to(pair)._connections)
    assert np.array_equal(pair.target.pool[: 4 * MIB], pair.writer.pool[: 4 * MIB])
    assert len(link_to(pair)._connections) == 2
    assert pair.target.engine.info()["writers"] == {str(pair.writer.me): "tcp"}


@pytest.mark.parametrize("number", [0, 1])
def test_one_lost_connection_ends_all_and_a_new_attachment_proves_quiet(number):
    pair, grants = slow_pair()
    assert pair.attach().outcome is Outcome.LANDED
    tickets = submit_until_joined(pair)
    tickets += [pair.writer.engine.submit(pair.target.me, whole_pool(pair)) for _ in range(8)]
    connections = link_to(pair)._connections
    wait_until(lambda: all(any(one.payload_sent for one in each._open.values()) for each in connections))
    connections[number]._dial.socket.shutdown(socket.SHUT_RDWR)
    outcomes = {ticket: pair.settle(ticket).outcome for ticket in tickets}
    unknown = [ticket for ticket in tickets if outcomes[ticket] is Outcome.FAILED_UNKNOWN]
    assert len(unknown) >= 2  # one on each connection
    assert set(outcomes.values()) <= set(FAILED)
    assert "lost" in pair.writer.engine.explain(pair.target.me)
    assert pair.write(pair.batch([0], [0], [100])).outcome is Outcome.FAILED_QUIET
    grants.go.set()
    assert_still_works(pair)
    assert {pair.settle(ticket).outcome for ticket in unknown} == {Outcome.QUIET}
    assert not grants.in_use(pair.writer.me, None)
    pair.close()


def test_memory_that_can_not_be_read_ends_the_attachment_with_the_reason(pair):
    pair.writer.engine.register([Region(pair.writer.address, 8 * MIB), Region(4096, 4 * MIB)])
    assert pair.attach().outcome is Outcome.LANDED
    tickets = submit_until_joined(pair)
    good = whole_pool(pair)
    nowhere = np.array([4096], np.uint64)
    tickets.append(pair.writer.engine.submit(pair.target.me, Batch(nowhere, good.dst, good.nbytes, 4 * MIB, 7)))
    ended = [pair.settle(ticket) for ticket in tickets]
    assert ended[-1].outcome is Outcome.FAILED_QUIET
    assert "Bad address" in ended[-1].cause
    assert_still_works(pair)


def test_at_the_target_one_lost_connection_ends_those_that_belong_to_it_and_no_others(pair):
    attachment = secrets.token_bytes(frames.ATTACHMENT_BYTES)
    first, second = (greeted(pair, caller_of(STRANGER, attachment, number)) for number in (0, 1))
    assert_still_works(pair)
    second.close()
    assert_closed(first)
    assert pair.write(pair.batch([0], [0], [100])).outcome is Outcome.LANDED


def test_a_late_connection_of_a_replaced_attachment_is_refused_and_replaces_nothing(pair):
    old = secrets.token_bytes(frames.ATTACHMENT_BYTES)
    first = greeted(pair, caller_of(STRANGER, old, 0))
    newer = greeted(pair, caller_of(STRANGER))
    assert_closed(first)
    for attachment, number in ((old, 1), (secrets.token_bytes(16), 3)):
        late, nonce = knock(pair)
        late.sendall(auth(pair, nonce, caller_of(STRANGER, attachment, number)))
        reply, why = read_reply(late)
        assert reply.code == frames.REFUSED
        assert "is not open here any more" in why
        late.close()
    pair.target.grant(STRANGER)
    half_a_batch(pair, newer)
    wait_until(lambda: pair.target.grants.in_use(STRANGER, 7))
    newer.close()


def test_a_writer_that_was_killed_with_half_a_batch_on_each_connection_is_quiet(pair):
    attachment = secrets.token_bytes(frames.ATTACHMENT_BYTES)
    both = [greeted(pair, caller_of(STRANGER, attachment, number)) for number in (0, 1)]
    for claim, connection in enumerate(both):
        pair.target.grant(STRANGER, claim)
        half_a_batch(pair, connection, claim)
    wait_until(lambda: all(pair.target.grants.in_use(STRANGER, claim) for claim in (0, 1)))
    for connection in both:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()  # with a reset, as from a process that is killed with unread bytes
    wait_until(lambda: not pair.target.grants.in_use(STRANGER, None))
    assert wait_for(pair.target.engine, pair.target.engine.fence(STRANGER), 5) is Outcome.LANDED
    assert pair.target.engine.info()["writers"] == {}


FLOOD = """
import sys
import numpy as np
from kvferry.engines.local import LocalEngine
from kvferry.engines.seam import Batch
from kvferry.ids import PeerId
from kvferry.testing.suite_pair import open_end
end = open_end(LocalEngine(), 77, 4 << 20, {"mechanism": "tcp"})
src, dst, size = (np.array([number], np.uint64) for number in (end.address, int(sys.argv[2]), 4 << 20))
open_tickets = {end.engine.attach(PeerId(2), bytes.fromhex(sys.argv[1]))}
while open_tickets:
    open_tickets -= {done.ticket for done in end.engine.poll(1)}
while True:
    while len(open_tickets) < 6:
        end.pool += 1
        open_tickets.add(end.engine.submit(PeerId(2), Batch(src, dst, size, 4 << 20, 7)))
    open_tickets -= {done.ticket for done in end.engine.poll(0.01)}
"""


def test_nothing_lands_after_the_fence_on_a_killed_writer_with_two_connections(pair):
    pair.target.grant(STRANGER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", FLOOD, pair.target.engine.describe().hex(), str(pair.target.address)]
    with subprocess.Popen(command, env=environment) as writer:
        try:
            receivers = pair.target.engine._target.writers.receivers
            wait_until(lambda: len(receivers(STRANGER)) == 2, 20)
            wait_until(lambda: pair.target.grants.in_use(STRANGER, 7))
        finally:
            writer.kill()
    assert wait_for(pair.target.engine, pair.target.engine.fence(STRANGER), 5) is Outcome.LANDED
    assert receivers(STRANGER) == []
    before = pair.target.pool.copy()
    time.sleep(0.1)
    assert np.array_equal(before, pair.target.pool)


class SlowReader(GrantTable):
    """Thinks for a while about each batch."""

    def begin(self, *arguments):
        time.sleep(0.05)
        return super().begin(*arguments)


def test_a_target_that_reads_slowly_gets_everything_and_holds_up_nobody(pair):
    slow = open_end(LocalEngine(), 3, 8 * MIB, TCP)
    slow.engine.close()
    slow.engine, slow.grants = LocalEngine(), SlowReader()
    slow.engine.open(EngineConfig(slow.me, slow.grants, options=TCP))
    slow.grant(pair.writer.me)
    assert pair.attach().outcome is Outcome.LANDED
    assert pair.settle(pair.writer.engine.attach(slow.me, slow.engine.describe())).outcome is Outcome.LANDED
    tickets = [pair.writer.engine.submit(slow.me, whole_pool(pair, slow.address)) for _ in range(16)]
    meanwhile = 0
    while set(tickets) - set(pair.ended):
        assert pair.write(pair.batch([0], [0], [MIB])).outcome is Outcome.LANDED
        meanwhile += 1
    assert meanwhile > 16
    assert all(pair.settle(ticket).outcome is Outcome.LANDED for ticket in tickets)
    assert np.array_equal(slow.pool[: 4 * MIB], pair.writer.pool[: 4 * MIB])
    slow.engine.close()


def test_a_fence_on_one_claim_spares_the_batch_of_another_claim_on_another_connection(pair):
    attachment = secrets.token_bytes(frames.ATTACHMENT_BYTES)
    both = [greeted(pair, caller_of(STRANGER, attachment, number)) for number in (0, 1)]
    for claim, connection in enumerate(both):
        pair.target.grant(STRANGER, claim)
        half_a_batch(pair, connection, claim)
    wait_until(lambda: all(pair.target.grants.in_use(STRANGER, claim) for claim in (0, 1)))
    assert wait_for(pair.target.engine, pair.target.engine.fence(STRANGER, 0), 5) is Outcome.LANDED
    for connection in both:
        connection.sendall(b"y" * 990)
    assert read_reply(both[1])[0].code == frames.OK
    reply, why = read_reply(both[0])
    assert reply.code == frames.REFUSED
    assert "a fence on claim 0 cut this batch after 10 bytes" in why
    for connection in both:
        connection.close()


def test_a_killed_target_ends_every_ticket_and_nothing_lands_twice(suite):
    process = spawned_target(suite)
    tickets = submit_until_joined(suite.pair, process.peer, process.address)
    process.stop()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:  # both connections are full now
        suite.pair.step()
    tickets += [suite.pair.writer.engine.submit(process.peer, whole_pool(suite.pair, process.address))]
    process.kill()
    outcomes = [suite.pair.settle(ticket).outcome for ticket in tickets]
    assert outcomes[-1] in FAILED
    assert Outcome.FAILED_UNKNOWN in outcomes
    assert Outcome.QUIET not in outcomes
    assert suite.settled_attach(process).outcome is Outcome.FAILED_QUIET


def test_a_stopped_target_takes_what_fits_in_the_buffers_and_everything_when_it_goes_on(suite):
    process, pair = spawned_target(suite), suite.pair
    assert pair.attach().outcome is Outcome.LANDED
    submit_until_joined(pair, process.peer, process.address)
    process.stop()
    tickets = [pair.writer.engine.submit(process.peer, whole_pool(pair, process.address)) for _ in range(30)]
    slowest, until = 0.0, time.monotonic() + 0.5
    while time.monotonic() < until:
        before = time.monotonic()
        pair.writer.engine.poll(0)
        slowest = max(slowest, time.monotonic() - before)
        assert pair.write(pair.batch([0], [0], [100_000])).outcome is Outcome.LANDED  # to another peer
    assert slowest < 1
    assert not set(tickets) & set(pair.ended)
    process.go_on()
    assert all(pair.settle(ticket).outcome is Outcome.LANDED for ticket in tickets)
    assert process.do("bytes", offset=0, nbytes=4 * MIB)["bytes"] == pair.writer.pool[: 4 * MIB].tobytes().hex()


def test_a_connection_that_may_not_join_is_done_without(pair, monkeypatch, caplog):
    monkeypatch.setattr(writers, "MAX_RECEIVERS", 1)
    assert pair.attach().outcome is Outcome.LANDED
    tickets = [pair.writer.engine.submit(pair.target.me, whole_pool(pair)) for _ in range(10)]
    assert all(pair.settle(ticket).outcome is Outcome.LANDED for ticket in tickets)
    wait_until(lambda: pair.step() == [] and len(link_to(pair)._connections) == 1)
    assert "no more than 1 connections, because" in caplog.text
    assert "1 connections are open, the most that are accepted" in caplog.text
    assert pair.write(whole_pool(pair)).outcome is Outcome.LANDED


def test_as_many_connections_as_the_option_says(monkeypatch):
    monkeypatch.setattr(tcp_link, "MUCH_BYTES", MIB)
    options = {**TCP, "tcp_connections": "5"}
    before = receiving_threads()
    pair = Pair(*[open_end(LocalEngine(), number, 8 * MIB, options) for number in (1, 2)])
    assert pair.attach().outcome is Outcome.LANDED
    tickets = submit_until_joined(pair, count=5)
    assert all(pair.settle(ticket).outcome is Outcome.LANDED for ticket in tickets)
    assert receiving_threads() - before == 5
    pair.close()


def test_one_connection_if_the_option_says_so():
    pair = Pair(*[open_end(LocalEngine(), number, 8 * MIB, {**TCP, "tcp_connections": "1"}) for number in (1, 2)])
    assert pair.attach().outcome is Outcome.LANDED
    tickets = [pair.writer.engine.submit(pair.target.me, whole_pool(pair)) for _ in range(6)]
    assert all(pair.settle(ticket).outcome is Outcome.LANDED for ticket in tickets)
    assert len(link_to(pair)._connections) == 1
    pair.close()


@pytest.mark.parametrize("value", ["0", "17", "two", "", "-1", "1.5"])
def test_a_number_of_connections_that_can_not_be_is_refused(value):
    with pytest.raises(ConfigError, match=rf"'tcp_connections' of the local engine is '{value}'.*from 1 to 16"):
        open_end(LocalEngine(), 1, 4096, {**TCP, "tcp_connections": value})
