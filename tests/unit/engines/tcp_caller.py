"""Connections to the data port of a local engine that are made by hand: what they say is up to the test."""

import contextlib
import secrets
import socket
import threading
import time

import numpy as np

from kvferry.engines.grants import GrantTable
from kvferry.engines.local import LocalEngine, blob, frames
from kvferry.engines.seam import Batch, EngineConfig, Outcome
from kvferry.ids import PeerId
from kvferry.testing.suite_pair import Pair, open_end

TCP = {"mechanism": "tcp"}
STRANGER = PeerId(77)
MIB = 1 << 20


class SlowGrants(GrantTable):
    """Admits nothing until it is told to."""

    def __init__(self):
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def begin(self, *arguments):
        self.asked.set()
        assert self.go.wait(20)
        return super().begin(*arguments)


def slow_pair():
    """A pair whose target admits no batch until its grants are told to, and these grants."""
    grants = SlowGrants()
    pair = Pair(*[open_end(LocalEngine(), number, 8 << 20, TCP) for number in (1, 2)])
    pair.target.engine.close()
    pair.target.engine, pair.target.grants = LocalEngine(), grants
    pair.target.engine.open(EngineConfig(pair.target.me, grants, options=TCP))
    return pair, grants


def knock(pair):
    """A connection to the target of a pair, and the nonce of its challenge."""
    said = blob.decode(pair.target.engine.describe())
    connection = socket.create_connection((said.tcp_host, said.tcp_port), timeout=5)
    return connection, frames.decode_challenge(read(connection, frames.CHALLENGE_BYTES))


def caller_of(peer=STRANGER, attachment=b"", number=0):
    """Who it says it is; a new attachment if none is given."""
    return frames.Caller(peer, attachment or secrets.token_bytes(frames.ATTACHMENT_BYTES), number)


def auth(pair, nonce, caller):
    """The right answer to a challenge."""
    return frames.encode_auth(blob.decode(pair.target.engine.describe()).token, nonce, caller)


def greeted(pair, caller=None):
    """A connection that the target has welcomed."""
    connection, nonce = knock(pair)
    connection.sendall(auth(pair, nonce, caller or caller_of()))
    reply, _ = read_reply(connection)
    assert reply.code == frames.OK
    return connection


def read(connection, nbytes):
    """So many bytes; fewer only at the end of the stream."""
    raw = b""
    while len(raw) < nbytes:
        more = connection.recv(nbytes - len(raw))
        if not more:
            break
        raw += more
    return raw


def read_reply(connection):
    """The head of a reply and its text."""
    reply = frames.decode_reply(read(connection, frames.REPLY_BYTES))
    return reply, read(connection, reply.text_bytes).decode()


def half_a_batch(pair, connection, claim=7, ticket=1):
    """Say that 1000 bytes come, and send 10."""
    row = np.array([pair.target.address, 1000], np.uint64).tobytes()
    connection.sendall(frames.encode_batch(1, ticket, claim, 1000) + row + b"x" * 10)


def assert_closed(connection):
    with contextlib.suppress(ConnectionResetError):  # closed with our bytes unread
        assert connection.recv(1) == b""
    connection.close()


def assert_still_works(pair):
    assert pair.attach().outcome is Outcome.LANDED
    assert pair.write(pair.batch([5], [9], [1000])).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool[9:1009], pair.writer.pool[5:1005])


def wait_until(condition, limit_s=5.0):
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.001)


def link_to(pair, peer=None):
    return pair.writer.engine._attachments[peer or pair.target.me].link


def whole_pool(pair, address=None):
    """A batch that writes the first 4 MiB, to the pair's target or to an address of another process."""
    batch = pair.batch([0], [0], [4 * MIB])
    dst = batch.dst if address is None else np.array([address], np.uint64)
    return Batch(batch.src, dst, batch.nbytes, batch.total_bytes, batch.claim)
