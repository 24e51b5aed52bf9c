"""The TCP path: what a lost connection, a fence, a peer that stops reading and hostile bytes do."""

import os
import socket
import time

import msgspec
import numpy as np
import pytest
from tcp_caller import TCP, assert_still_works, slow_pair

from kvferry.engines.grants import GrantTable
from kvferry.engines.local import LocalEngine, blob, frames, pick
from kvferry.engines.seam import EngineConfig, Outcome
from kvferry.errors import AddressError
from kvferry.ids import PeerId
from kvferry.testing.suite import FLOOD_BYTES
from kvferry.testing.suite_pair import GUARD, Pair, open_end, wait_for


def test_a_lost_connection_leaves_unknown_and_a_new_one_proves_quiet():
    pair, grants = slow_pair()
    writer, target = pair.writer, pair.target
    assert pair.attach().outcome is Outcome.LANDED
    begun = writer.engine.submit(target.me, pair.batch([0], [0], [8 << 20]))
    unsent = writer.engine.submit(target.me, pair.batch([0], [0], [100]))
    assert grants.asked.wait(10)
    pair.step()
    writer.engine._attachments[target.me].link._connections[0]._dial.socket.shutdown(socket.SHUT_RDWR)
    assert pair.settle(begun).outcome is Outcome.FAILED_UNKNOWN
    assert pair.settle(unsent).outcome is Outcome.FAILED_QUIET
    assert pair.write(pair.batch([0], [0], [100])).outcome is Outcome.FAILED_QUIET

    again = writer.engine.attach(target.me, target.engine.describe())
    assert wait_for(writer.engine, again, 0.3) is None  # the old connection has not ended at the target
    grants.go.set()
    assert pair.settle(again).outcome is Outcome.LANDED
    assert pair.settle(begun).outcome is Outcome.QUIET
    assert (target.pool == GUARD).all()
    assert not grants.in_use(writer.me, None)
    assert_still_works(pair)
    pair.close()


def test_a_fence_on_one_claim_cuts_a_stopped_writer_in_mid_batch_and_spares_its_other_claims(suite):
    process, target = suite.flooding(), suite.pair.target
    until = time.monotonic() + 20
    while True:
        process.stop()
        time.sleep(0.02)  # what was sent is received; what was not never will be while it is stopped
        if target.grants.in_use(process.peer, 7):
            break
        assert time.monotonic() < until, "never stopped in the middle of a batch"
        process.go_on()
    suite.assert_fence_lands(target.engine.fence(process.peer, 7))
    assert not target.grants.in_use(process.peer, 7)
    process.go_on()
    suite.assert_still_for(0.2)
    target.grant(process.peer, 8)
    answer = process.do("write", peer=[target.me.incarnation, 0], claim=8, dst=target.address, fill=0x5A)
    assert answer["outcome"] == Outcome.LANDED.value
    assert (target.pool[:FLOOD_BYTES] == 0x5A).all()
    assert target.engine.info()["writers"] == {str(process.peer): "tcp"}


def test_a_peer_that_stops_reading_blocks_neither_the_caller_nor_another_peer(suite):
    stopped, writer = suite.spawn(), suite.pair.writer
    stopped.do("grant", peer=[1, 0], claim=7)
    assert suite.settled_attach(stopped).outcome is Outcome.LANDED
    assert suite.pair.attach().outcome is Outcome.LANDED
    stopped.stop()
    batch = suite.pair.batch([0], [0], [FLOOD_BYTES])
    batch = type(batch)(batch.src, np.array([stopped.address], np.uint64), batch.nbytes, FLOOD_BYTES, 7)
    slowest, tickets = 0.0, []
    for _ in range(20):
        before = time.monotonic()
        tickets.append(writer.engine.submit(stopped.peer, batch))
        writer.engine.poll(0)
        slowest = max(slowest, time.monotonic() - before)
    assert suite.pair.write(suite.pair.batch([0], [0], [1 << 20])).outcome is Outcome.LANDED
    assert slowest < 1.0
    assert not set(tickets) & set(suite.pair.ended)
    stopped.go_on()
    assert all(suite.pair.settle(ticket).outcome is Outcome.LANDED for ticket in tickets)


def test_a_stopped_target_fails_the_attach_within_its_limit_and_never_blocks_a_call(suite, monkeypatch):
    monkeypatch.setattr(pick, "OPENING_S", 1)
    process = suite.spawn()
    process.stop()
    before = time.monotonic()
    ticket = suite.pair.writer.engine.attach(process.peer, process.blob)
    assert time.monotonic() - before < 0.7
    done = suite.pair.settle(ticket)
    assert done.outcome is Outcome.FAILED_QUIET
    assert "no answer" in done.cause


def test_a_row_of_the_target_that_is_no_memory_is_named_and_the_connection_goes_on(pair):
    assert pair.attach().outcome is Outcome.LANDED
    pair.target.grants.add(pair.writer.me, 7, [4096], [8192])
    bad = pair.batch([0, 0], [0, 0], [100, 100])
    bad.dst[1] = 4096
    done = pair.write(bad)
    assert done.outcome is Outcome.FAILED_QUIET
    assert "row 0 of 2 or one after it" in done.cause
    assert "EFAULT" in done.cause
    assert pair.write(pair.batch([0], [0], [100])).outcome is Outcome.LANDED


NONCE = bytes(range(frames.NONCE_BYTES))
CHALLENGE = frames.encode_challenge(NONCE)


def welcome(token, auth):
    caller = frames.decode_auth(auth, token, NONCE)
    return frames.encode_reply(frames.OK, 0, frames.welcome(token, NONCE, caller))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (os.urandom(500), None),
        (b"", None),
        (b"kfR1", None),
        (CHALLENGE[:20], None),
        (frames.encode_reply(frames.OK), None),
        (CHALLENGE, lambda token, auth: CHALLENGE),
        (CHALLENGE, lambda token, auth: frames.encode_reply(frames.OK)),
        (CHALLENGE, lambda token, auth: welcome(token, auth)[:-1] + b"?"),
        (CHALLENGE, lambda token, auth: welcome(token, auth) + frames.encode_reply(frames.OK, 12345)),
    ],
    ids=["random", "nothing", "truncated", "half a challenge", "OK at once", "challenged twice", "no proof",
         "a wrong proof", "a ticket that was never sent"],
)  # fmt: skip
def test_a_target_that_talks_nonsense_loses_the_connection_and_nothing_else(pair, first, then):
    said = blob.decode(pair.target.engine.describe())
    with socket.create_server(("127.0.0.1", 0)) as server:
        fake = msgspec.structs.replace(said, tcp_port=server.getsockname()[1])
        ticket = pair.writer.engine.attach(PeerId(66), blob.encode(fake))
        server.settimeout(5)
        connection, _ = server.accept()
        connection.settimeout(5)
        connection.sendall(first)
        if then is not None:
            pair.step()
            connection.sendall(then(said.token, connection.recv(frames.AUTH_BYTES)))
        connection.shutdown(socket.SHUT_WR)
        pair.settle(ticket)
        until = time.monotonic() + 5
        while "lost" not in pair.writer.engine.explain(PeerId(66)) and time.monotonic() < until:
            pair.step()
        assert "lost" in pair.writer.engine.explain(PeerId(66))
        connection.close()
    assert_still_works(pair)


def test_the_token_never_goes_over_the_wire(pair):
    said = blob.decode(pair.target.engine.describe())
    auth = frames.encode_auth(said.token, NONCE, frames.Caller(PeerId(1), bytes(16), 0))
    assert said.token not in auth
    assert said.token not in welcome(said.token, auth)


def test_nobody_who_listens_means_a_failed_attach_with_the_reason(pair):
    said = blob.decode(pair.target.engine.describe())
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    gone = blob.encode(msgspec.structs.replace(said, tcp_port=free))
    done = pair.settle(pair.writer.engine.attach(PeerId(66), gone))
    assert done.outcome is Outcome.FAILED_QUIET
    assert "ECONNREFUSED" in done.cause


def test_a_host_name_is_resolved_without_blocking_and_a_wrong_one_is_named(pair, monkeypatch):
    said = blob.decode(pair.target.engine.describe())
    named = blob.encode(msgspec.structs.replace(said, tcp_host="localhost"))
    assert pair.settle(pair.writer.engine.attach(pair.target.me, named)).outcome is Outcome.LANDED
    real = socket.getaddrinfo

    def slow(host, *arguments, flags=0, **more):
        if flags & socket.AI_NUMERICHOST:
            return real(host, *arguments, flags=flags, **more)
        time.sleep(1)
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    wrong = blob.encode(msgspec.structs.replace(said, tcp_host="no-such-host.invalid"))
    before = time.monotonic()
    ticket = pair.writer.engine.attach(pair.target.me, wrong)
    assert time.monotonic() - before < 0.7
    done = pair.settle(ticket)
    assert done.outcome is Outcome.FAILED_QUIET
    assert "no-such-host.invalid" in done.cause


@pytest.mark.parametrize("host", ["::1", "localhost", "127.0.0.1"])
def test_ipv6_addresses_and_names_work(host):
    ends = []
    for number in (1, 2):
        end = open_end(LocalEngine(), number, 4096, TCP)
        end.engine.close()
        end.engine = LocalEngine()
        config = EngineConfig(end.me, end.grants, bind_host=host, advertise_host=host, options=TCP)
        end.engine.open(config)
        ends.append(end)
    pair = Pair(*ends)
    assert pair.attach().outcome is Outcome.LANDED
    pair.close()


def test_a_port_range_is_searched_and_a_full_one_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        engine = LocalEngine()
        with pytest.raises(AddressError, match=rf"127\.0\.0\.1 in the port range {taken}-{taken}"):
            engine.open(EngineConfig(PeerId(1), GrantTable(), data_ports=(taken, taken), options=TCP))
        engine.open(EngineConfig(PeerId(1), GrantTable(), data_ports=(taken, min(taken + 20, 65535)), options=TCP))
        assert engine.info()["tcp_port"] > taken
        engine.close()


@pytest.mark.parametrize("ports", [(2, 1), (-1, 5), (1, 70000)])
def test_a_range_that_is_none_is_refused(ports):
    with pytest.raises(AddressError, match="data_ports"):
        LocalEngine().open(EngineConfig(PeerId(1), GrantTable(), data_ports=ports, options=TCP))


def test_a_host_to_bind_that_does_not_resolve_is_refused():
    with pytest.raises(AddressError, match=r"no-such-host\.invalid"):
        LocalEngine().open(EngineConfig(PeerId(1), GrantTable(), bind_host="no-such-host.invalid", options=TCP))
