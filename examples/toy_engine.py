"""A toy transfer engine: rows go through a Unix socket, and the target's own `poll` writes them where they belong.

It is small and slow, and honest: it passes kvferry's engine suite (test_toy_engine.py). docs/write-an-engine.md
explains it from top to bottom. Everything happens in the thread that calls it, so there is not one lock.
"""

from __future__ import annotations

import ctypes
import errno
import hmac
import itertools
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from kvferry.engines.intervals import Intervals
from kvferry.engines.seam import Batch, Caps, Done, EngineConfig, Limits, Outcome, Region, Ticket
from kvferry.errors import ConfigError, EngineError, ForkError
from kvferry.ids import PeerId

HEAD = struct.Struct("<BQI")  # kind, ticket, bytes that follow
HELLO, WELCOME, NO, WRITE, LANDED, REFUSED = range(6)
MOST_AT_ONCE, OPENING_S = 1 << 20, 5.0


class Blob(msgspec.Struct, forbid_unknown_fields=True):
    """What a peer is told, as JSON: where to connect, and the secret that lets it in."""

    socket: str
    token: str


class Hello(msgspec.Struct, forbid_unknown_fields=True):
    """What a writer says first, as JSON."""

    incarnation: int
    epoch: int
    token: str


class Connection:
    """A socket that never waits, with what has not been sent and what has not been understood yet."""

    def __init__(self, sock: socket.socket, peer: PeerId | None = None, attach: Ticket = 0) -> None:
        self.sock, self.peer, self.attach = sock, peer, attach
        self.opened_at, self.welcome = time.monotonic(), False
        self.tickets: set[Ticket] = set()
        self.inbox, self.outbox = bytearray(), bytearray()
        sock.setblocking(False)

    def send(self, kind: int, ticket: Ticket = 0, payload: bytes = b"") -> None:
        """Queue one message."""
        self.outbox += HEAD.pack(kind, ticket, len(payload)) + payload

    def flush(self) -> None:
        """Send what the socket takes. Raises OSError when the other end is gone."""
        try:
            while self.outbox:
                del self.outbox[: self.sock.send(memoryview(self.outbox)[:MOST_AT_ONCE])]
        except BlockingIOError:
            pass

    def messages(self, most: int) -> Iterator[tuple[int, Ticket, bytes]]:
        """Read once and yield whole messages. Raises OSError at the end, or when one is larger than `most` bytes."""
        try:
            raw = self.sock.recv(MOST_AT_ONCE)
        except BlockingIOError:
            return
        if not raw:
            raise ConnectionResetError(errno.ECONNRESET, "the other end has closed")
        self.inbox += raw
        while len(self.inbox) >= HEAD.size:
            kind, ticket, length = HEAD.unpack_from(self.inbox)
            if length > most:
                raise ConnectionAbortedError(errno.EMSGSIZE, f"a message of {length} bytes")
            if len(self.inbox) < HEAD.size + length:
                return
            payload = bytes(self.inbox[HEAD.size : HEAD.size + length])
            del self.inbox[: HEAD.size + length]
            yield kind, ticket, payload


class ToyEngine:
    """Nine calls. The target checks every row against the grants before it writes it, so it can stop a peer itself."""

    name = "toy"
    caps = Caps.GRANTS | Caps.FENCE | Caps.NEEDS_TARGET_POLL
    limits = Limits(rows=4096, bytes=4 << 20)

    def __init__(self) -> None:
        self._pid, self._selector = 0, None
        self._tickets = itertools.count(1)
        self._done: list[Done] = []
        self._sources = Intervals.none()
        self._to: dict[PeerId, Connection] = {}  # where this engine writes
        self._from: set[Connection] = set()  # who writes here
        self._fenced: set[PeerId] = set()
        self._unknown: dict[PeerId, list[Ticket]] = {}

    # -- the nine calls

    def open(self, config: EngineConfig) -> None:
        """Listen at a socket of the abstract namespace, which goes with the process."""
        if self._selector is not None:
            raise EngineError("the toy engine is open already")
        if config.options:
            raise ConfigError(f"the toy engine has no option {min(config.options)!r}")
        self._me, self._grants, self._pid = config.me, config.grants, os.getpid()
        self._token, self._address = secrets.token_hex(16), f"kvferry-toy-{secrets.token_hex(8)}"
        self._door = socket.socket(socket.AF_UNIX)
        self._door.setblocking(False)
        self._door.bind(f"\0{self._address}")
        self._door.listen(128)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ, None)

    def register(self, regions: Sequence[Region]) -> None:
        """Take the memory that rows may be read from; what may be written is the grants' business."""
        for number, region in enumerate(regions):
            if region.device >= 0 or region.nbytes < 0 or not 0 <= region.address < 2**64 - region.nbytes:
                raise EngineError(f"region {number} is no memory of this host: {region}")
        starts = np.array([region.address for region in regions], np.uint64)
        self._sources = Intervals.merged(starts, starts + np.array([region.nbytes for region in regions], np.uint64))

    def describe(self) -> bytes:
        """Where the socket is, and the secret."""
        self._opened()
        return msgspec.json.encode(Blob(self._address, self._token))

    def attach(self, peer: PeerId, blob: bytes) -> Ticket:
        """Connect and say hello; the ticket ends when the target has welcomed us."""
        self._opened()
        self._forget(peer)
        ticket = next(self._tickets)
        try:
            said = msgspec.json.decode(blob, type=Blob)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._to[peer] = connection = Connection(sock, peer, ticket)
            self._watch(connection)
            sock.connect(f"\0{said.socket}")
        except (msgspec.DecodeError, UnicodeError) as error:
            self._fail(ticket, f"this is no blob of a toy engine: {error}", "blob")
            return ticket
        except OSError as error:
            self._lost(connection, error)
            return ticket
        hello = Hello(self._me.incarnation, peer.epoch, said.token)
        connection.send(HELLO, 0, msgspec.json.encode(hello))
        self._step(connection)
        return ticket

    def submit(self, peer: PeerId, batch: Batch) -> Ticket:
        """Check the rows, copy them into one message, and send what the socket takes."""
        self._opened()
        ticket, connection = next(self._tickets), self._to.get(peer)
        reason = self._why_not(batch)
        if not reason and (connection is None or not connection.welcome):
            reason = f"peer {peer} is not attached"
        if reason or connection is None:
            self._fail(ticket, reason, "refused")
            return ticket
        rows = zip(batch.src.tolist(), batch.nbytes.tolist(), strict=True)
        data = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in rows)
        head = struct.pack("<QQ", batch.claim, len(batch)) + batch.dst.tobytes() + batch.nbytes.tobytes()
        connection.tickets.add(ticket)
        connection.send(WRITE, ticket, head + data)
        self._step(connection)
        return ticket

    def poll(self, budget_s: float) -> list[Done]:
        """Send, receive and write whatever can be, until there is an outcome or the budget is over."""
        selector = self._opened()
        until = time.monotonic() + budget_s
        while True:
            wait_s = 0.0 if self._done else max(0.0, until - time.monotonic())
            for key, _ in selector.select(min(wait_s, 0.05)):
                if key.data is None:
                    self._accept()
                else:
                    self._step(key.data, readable=True)
            self._give_up_waiting()
            if self._done or time.monotonic() >= until:
                found, self._done = self._done, []
                return found

    def fence(self, peer: PeerId, claim: int | None = None) -> Ticket:
        """Proof at once: only our own `poll` writes, and from now on it refuses."""
        self._opened()
        self._grants.drop(peer, claim)
        if claim is None:
            self._fenced.add(peer)
            self._cut(peer)
        ticket = next(self._tickets)
        self._done.append(Done(ticket, Outcome.LANDED))
        return ticket

    def detach(self, peer: PeerId) -> None:
        """Close the connections in both directions."""
        self._opened()
        self._forget(peer)
        self._cut(peer)

    def close(self) -> None:
        """Close everything. In a forked child nothing: the sockets are the parent's."""
        if self._selector is None or self._pid != os.getpid():
            return
        for peer in list(self._to):
            self._forget(peer)
        for connection in list(self._from):
            self._end(connection)
        self._selector.close()
        self._door.close()
        self._selector = None

    # -- the writer

    def _why_not(self, batch: Batch) -> str:
        if not len(batch) == len(batch.dst) == len(batch.nbytes):
            return f"{len(batch)} sources, {len(batch.dst)} destinations, {len(batch.nbytes)} lengths"
        if len(batch) > self.limits.rows or batch.total_bytes > self.limits.bytes:
            return f"{len(batch)} rows of {batch.total_bytes} bytes are over the limits {self.limits}"
        row = self._sources.first_outside(batch.src, batch.nbytes)
        if row is not None:
            return f"row {row} does not lie in registered memory of this process"
        total = int(batch.nbytes.sum())
        return "" if total == batch.total_bytes else f"the rows have {total} bytes, not {batch.total_bytes}"

    def _answered(self, connection: Connection, kind: int, ticket: Ticket, text: str) -> None:
        if kind == WELCOME:
            connection.welcome = True
            self._done.append(Done(connection.attach, Outcome.LANDED))
            # the target has closed our older connections before it welcomed this one
            quiet = self._unknown.pop(connection.peer, [])
            self._done += [Done(old, Outcome.QUIET) for old in quiet]
        elif kind == NO:
            self._lost(connection, ConnectionRefusedError(errno.ECONNREFUSED, f"the target said: {text}"))
        elif ticket in connection.tickets:
            connection.tickets.remove(ticket)
            if kind == LANDED:
                self._done.append(Done(ticket, Outcome.LANDED))
            else:
                self._fail(ticket, f"the target refused: {text}", "refused")

    def _forget(self, peer: PeerId) -> None:
        """Close our connection to a peer. What was sent may be in its socket still, so its fate is not known."""
        connection = self._to.pop(peer, None)
        if connection is None:
            return
        self._end(connection)
        if not connection.welcome:
            self._fail(connection.attach, "detached before the target answered", "detached")
        for ticket in connection.tickets:
            self._done.append(Done(ticket, Outcome.FAILED_UNKNOWN, "detached before it was answered", "detached"))
            self._unknown.setdefault(peer, []).append(ticket)

    def _give_up_waiting(self) -> None:
        for connection in list(self._to.values()):
            if not connection.welcome and time.monotonic() - connection.opened_at > OPENING_S:
                self._lost(connection, TimeoutError(errno.ETIMEDOUT, f"no answer within {OPENING_S:.0f} s"))

    # -- the target

    def _accept(self) -> None:
        try:
            sock, _ = self._door.accept()
        except OSError:
            return  # it has gone again, or no descriptor is left; there is a next poll
        connection = Connection(sock)
        self._from.add(connection)
        self._watch(connection)

    def _asked(self, connection: Connection, kind: int, ticket: Ticket, payload: bytes) -> None:
        if kind == HELLO and connection.peer is None:
            connection.send(*self._let_in(connection, msgspec.json.decode(payload, type=Hello)))
        elif kind == WRITE and connection.welcome:
            reason = self._write(connection.peer, payload)
            connection.send(REFUSED if reason else LANDED, ticket, reason.encode())
        else:
            raise ConnectionAbortedError(errno.EPROTO, f"message {kind} at this point")

    def _let_in(self, connection: Connection, hello: Hello) -> tuple[int, Ticket, bytes]:
        peer = PeerId(hello.incarnation, hello.epoch)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return NO, 0, b"this is not the token of this engine"
        if peer in self._fenced:
            return NO, 0, b"a fence was asked for this peer"
        self._cut(peer)
        connection.peer, connection.welcome = peer, True
        return WELCOME, 0, b""

    def _write(self, peer: PeerId, payload: bytes) -> str:
        """Check all rows, then write them; nothing is written of a batch with one bad row."""
        claim, rows = struct.unpack_from("<QQ", payload)
        at = 16 + 16 * rows
        if rows > self.limits.rows or at > len(payload):
            return f"{rows} rows in {len(payload)} bytes"
        dst, nbytes = np.frombuffer(payload, np.uint64, 2 * rows, 16).reshape(2, rows)
        if int(nbytes.sum()) != len(payload) - at:
            return f"{int(nbytes.sum())} bytes were promised and {len(payload) - at} came"
        reason = self._grants.begin(peer, claim, dst, nbytes)
        if reason:
            return reason
        for address, length in zip(dst.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(address, payload[at : at + length], length)
            at += length
        self._grants.end(peer, claim)
        return ""

    def _cut(self, peer: PeerId) -> None:
        """End what a peer has open here; rows that were not read yet are lost with it."""
        for connection in [one for one in self._from if one.peer == peer]:
            self._end(connection)

    # -- both

    def _opened(self) -> selectors.BaseSelector:
        if self._selector is None:
            raise EngineError("the toy engine is not open")
        if self._pid != os.getpid():
            raise ForkError(f"this toy engine was opened in process {self._pid}, not in its fork {os.getpid()}")
        return self._selector

    def _step(self, connection: Connection, *, readable: bool = False) -> None:
        """Send, receive and understand; whatever goes wrong ends this connection, and no other."""
        hear = self._asked if connection in self._from else self._answered
        most = self.limits.bytes + 16 * (self.limits.rows + 1)
        try:
            if readable:
                for kind, ticket, payload in connection.messages(most):
                    text = payload if hear == self._asked else payload.decode(errors="replace")
                    hear(connection, kind, ticket, text)
            connection.flush()
        except (OSError, msgspec.DecodeError, struct.error, ValueError) as error:
            self._lost(connection, error)
        self._watch(connection)

    def _lost(self, connection: Connection, error: Exception) -> None:
        """The other end has closed, or is closed now: it reads nothing of this connection any more."""
        self._end(connection)
        if self._to.get(connection.peer) is not connection:
            return
        del self._to[connection.peer]
        native = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        for ticket in [*([] if connection.welcome else [connection.attach]), *connection.tickets]:
            self._fail(ticket, f"connection to {connection.peer}: {error}", native)

    def _end(self, connection: Connection) -> None:
        self._from.discard(connection)
        if connection.sock.fileno() in self._opened().get_map():
            self._opened().unregister(connection.sock)
        connection.sock.close()

    def _watch(self, connection: Connection) -> None:
        """Wait for the socket to be readable, and writable while something is to be sent."""
        if connection.sock.fileno() < 0:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outbox else 0)
        if connection.sock in self._opened().get_map():
            self._opened().modify(connection.sock, events, connection)
        else:
            self._opened().register(connection.sock, events, connection)

    def _fail(self, ticket: Ticket, cause: str, native: str) -> None:
        self._done.append(Done(ticket, Outcome.FAILED_QUIET, cause, native))
