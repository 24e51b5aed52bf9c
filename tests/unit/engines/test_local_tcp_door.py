"""The data port: who is let in, who is turned away and counted, and what hostile bytes cost."""

import os
import socket
import tracemalloc

import numpy as np
import pytest
from tcp_caller import (
    STRANGER,
    assert_closed,
    assert_still_works,
    auth,
    caller_of,
    greeted,
    half_a_batch,
    knock,
    read_reply,
    wait_until,
)

from kvferry.engines.local import frames, tcp_door, writers
from kvferry.engines.seam import Outcome
from kvferry.ids import PeerId
from kvferry.testing.suite_pair import GUARD, wait_for

NONCE = bytes(32)
GARBAGE = [
    frames.encode_auth(bytes(32), NONCE, caller_of()),
    os.urandom(frames.AUTH_BYTES),
    os.urandom(200_000),
    b"GET / HTTP/1.1\r\n\r\n" * 5,
    b"k",
]


@pytest.mark.parametrize("said", GARBAGE, ids=["token", "random", "200 kB", "http", "truncated"])
def test_whoever_does_not_prove_to_hold_the_token_is_turned_away_and_counted(pair, said):
    connection, _ = knock(pair)
    connection.sendall(said)
    if len(said) < frames.AUTH_BYTES:
        connection.shutdown(socket.SHUT_WR)
    assert_closed(connection)
    assert pair.target.engine.info()["garbage"] == 1
    assert_still_works(pair)


def test_a_recorded_proof_is_good_for_one_connection_only_and_replaces_nothing(pair):
    connection, nonce = knock(pair)
    recorded = auth(pair, nonce, caller_of())
    connection.sendall(recorded)
    assert read_reply(connection)[0].code == frames.OK
    replayed, other_nonce = knock(pair)
    assert other_nonce != nonce
    replayed.sendall(recorded)
    assert_closed(replayed)
    assert pair.target.engine.info()["garbage"] == 1
    pair.target.grant(STRANGER)
    half_a_batch(pair, connection)
    wait_until(lambda: pair.target.grants.in_use(STRANGER, 7))
    connection.close()


def test_a_proof_is_bound_to_who_made_it(pair):
    for changed in (caller_of(PeerId(78)), caller_of(PeerId(77, 1)), caller_of(number=1), caller_of()):
        connection, nonce = knock(pair)
        right = auth(pair, nonce, caller_of(STRANGER))
        wrong = auth(pair, nonce, changed)
        connection.sendall(wrong[:-32] + right[-32:])
        assert_closed(connection)
    assert pair.target.engine.info()["garbage"] == 4
    assert pair.target.engine.info()["writers"] == {}


def test_whoever_says_nothing_is_turned_away(pair, monkeypatch):
    monkeypatch.setattr(tcp_door, "GREETING_S", 0.1)
    connection, _ = knock(pair)
    assert_closed(connection)
    assert pair.target.engine.info()["garbage"] == 1


def test_strangers_that_fill_the_door_do_not_keep_an_honest_writer_out(pair, monkeypatch):
    monkeypatch.setattr(tcp_door, "MAX_GUESTS", 4)
    strangers = [knock(pair)[0] for _ in range(10)]
    assert_still_works(pair)
    for stranger in strangers:
        stranger.close()


def test_more_connections_than_are_accepted_are_refused_with_the_number(pair, monkeypatch):
    first = greeted(pair)
    monkeypatch.setattr(writers, "MAX_RECEIVERS", 1)
    done = pair.attach()
    assert done.outcome is Outcome.FAILED_QUIET
    assert "1 connections are open, the most that are accepted" in done.cause
    first.close()
    wait_until(lambda: pair.target.engine.info()["writers"] == {})
    assert_still_works(pair)


HEAD = frames._BATCH
MAGIC = frames._BATCH_MAGIC
HUGE = 2**63


def rows(*nbytes):
    return np.array([[0x1000] * len(nbytes), nbytes], np.uint64).tobytes()


@pytest.mark.parametrize(
    "frame",
    [
        HEAD.pack(MAGIC, 2**32 - 1, 1, 7, 100),
        HEAD.pack(MAGIC, 1, 1, 7, 2**64 - 1),
        HEAD.pack(MAGIC, 0, 1, 7, 0),
        HEAD.pack(MAGIC, 1, 1, 7, 10) + rows(11),
        HEAD.pack(MAGIC, 3, 1, 7, 10) + rows(HUGE, HUGE, 10),
        HEAD.pack(b"oops", 1, 1, 7, 10) + rows(10),
        os.urandom(200_000),
    ],
    ids=["rows", "bytes", "none", "sum", "sum that wraps round", "magic", "random"],
)
def test_a_batch_that_claims_nonsense_ends_its_connection_and_allocates_nothing(pair, frame):
    connection = greeted(pair)
    tracemalloc.start()
    connection.sendall(frame)
    assert_closed(connection)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    assert pair.target.engine.info()["garbage"] == 1
    assert (pair.target.pool == GUARD).all()
    assert_still_works(pair)


def test_a_truncated_batch_gives_its_grant_back(pair):
    connection = greeted(pair)
    pair.target.grant(STRANGER)
    half_a_batch(pair, connection)
    wait_until(lambda: pair.target.grants.in_use(STRANGER, 7))
    connection.close()
    wait_until(lambda: not pair.target.grants.in_use(STRANGER, 7))
    assert_still_works(pair)


def test_a_batch_in_many_small_pieces_lands(pair):
    connection = greeted(pair)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pair.target.grant(STRANGER)
    row = np.array([pair.target.address + 3, 100], np.uint64).tobytes()
    raw = frames.encode_batch(1, 5, 7, 100) + row + bytes(range(100))
    for at in range(len(raw)):
        connection.send(raw[at : at + 1])
    reply, _ = read_reply(connection)
    assert (reply.code, reply.ticket) == (frames.OK, 5)
    assert pair.target.pool[:104].tolist() == [GUARD] * 3 + list(range(100)) + [GUARD]
    connection.close()


def test_a_refused_batch_is_thrown_away_to_its_end_and_the_next_one_lands(pair):
    connection = greeted(pair)
    pair.target.grant(STRANGER)
    row = np.array([pair.target.address, 100_000], np.uint64).tobytes()
    for ticket, claim in ((1, 8), (2, 7)):
        connection.sendall(frames.encode_batch(1, ticket, claim, 100_000) + row + b"y" * 100_000)
    first, why = read_reply(connection)
    assert (first.code, first.ticket) == (frames.REFUSED, 1)
    assert "claim 8" in why
    second, _ = read_reply(connection)
    assert (second.code, second.ticket) == (frames.OK, 2)
    connection.close()


def test_a_writer_that_reads_no_replies_is_waited_for_and_holds_up_nobody(pair):
    connection = greeted(pair)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(0.3)
    row = np.array([pair.target.address, 1], np.uint64).tobytes()
    sent = 0
    try:
        while sent < 2_000_000:  # its refusals fill the buffers of both ends, then the target reads no more
            connection.sendall(frames.encode_batch(1, sent, 7, 1) + row + b"z")
            sent += 1
    except TimeoutError:
        pass
    assert 0 < sent < 2_000_000
    assert_still_works(pair)
    fence = pair.target.engine.fence(STRANGER)
    assert wait_for(pair.target.engine, fence, 5) is Outcome.LANDED
    connection.close()
