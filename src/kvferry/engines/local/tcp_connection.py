"""The writer's end of one TCP connection: batches straight from memory, each acknowledged by the receiver."""

from __future__ import annotations

import hmac
import socket

import numpy as np

from kvferry.engines.local import frames
from kvferry.engines.local.dial import Dial
from kvferry.engines.local.iovec import Cursor, vectors_of
from kvferry.engines.local.link import State
from kvferry.engines.local.loop import Loop
from kvferry.engines.local.outbox import Outbox, Sending
from kvferry.engines.seam import Batch, Done, Outcome, Ticket
from kvferry.errors import WireError

_REPLY_READ_BYTES = 64 << 10


class TcpConnection:
    """Sends without waiting. A ticket lands when the receiver, which wrote it, says so.

    A connection that is lost leaves what may still be in the receiver's socket buffer: such tickets end
    FAILED_UNKNOWN; those of which no payload byte was sent end FAILED_QUIET.

    Attributes:
        number: its number in the attachment; 0 began it.
        state: OPENING until both sides have proven that they hold the token.
        why: why it is lost, in words.
        done: tickets that have ended; whoever reads them empties the list.
        unanswered: payload bytes of open tickets.
    """

    def __init__(self, token: bytes, caller: frames.Caller, dial: Dial) -> None:
        self.number = caller.number
        self.state = State.OPENING
        self.why = ""
        self.done: list[Done] = []
        self.unanswered = 0
        self._token = token
        self._caller = caller
        self._dial = dial
        self._nonce = b""
        self._outbox = Outbox()
        self._open: dict[Ticket, Sending] = {}
        self._heard = bytearray()

    def fileno(self) -> int:
        """The socket, or -1 while there is none."""
        return self._dial.socket.fileno() if self._dial.socket is not None else -1

    def wants_write(self) -> bool:
        """While there is something to send; the target speaks first, so a connection that opens only listens."""
        return self._outbox.waits()

    def address(self) -> tuple[socket.AddressFamily, tuple[object, ...]]:
        """Where it is connected to; raises OSError when it is not."""
        assert self._dial.socket is not None
        return self._dial.socket.family, self._dial.socket.getpeername()

    def give_to(self, lane: Loop) -> None:
        """Let this thread send from now on what is not small."""
        self._outbox.give_to(lane)

    def submit(self, ticket: Ticket, batch: Batch) -> None:
        """Queue a batch; only when READY."""
        raw = frames.encode_batch(len(batch), ticket, batch.claim, batch.total_bytes)
        head = np.frombuffer(raw + batch.dst.tobytes() + batch.nbytes.tobytes(), np.uint8)
        first = np.array([[head.ctypes.data, len(head)]], np.uint64)
        vectors = np.concatenate([first, vectors_of(batch.src, batch.nbytes)])
        cursor = Cursor(vectors, len(head) + batch.total_bytes)
        sending = self._open[ticket] = Sending(ticket, head, batch.total_bytes, cursor)
        self._outbox.put(sending)
        self.unanswered += batch.total_bytes

    def step(self, budget_bytes: int) -> None:
        """Connect, send about budget_bytes at most, read replies: whatever can be done now."""
        if self.state is State.LOST:
            return
        self._dial.tidy()
        try:
            if self.state is State.READY:
                self._outbox.go_on(budget_bytes)
            self._read()
        except (WireError, OSError) as error:
            self.lose(self._why(self._outbox.problem or error))

    def lose(self, why: str) -> None:
        """Close it; open tickets end. May be called twice."""
        if self.state is State.LOST:
            return
        self.state, self.why = State.LOST, why
        self._outbox.close(self._dial.close)
        for sending in self._open.values():
            self._fail(sending)
        self._open.clear()

    def _read(self) -> None:
        connection = self._dial.begin()
        if connection is None:
            return
        try:
            raw = connection.recv(_REPLY_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if self._nonce:
                raise
            self._dial.failed(error)
            self._dial.begin()
            return
        if not raw:
            raise WireError(f"{self._dial.where} has closed the connection")
        self._heard += raw
        while self._take_frame():
            pass

    def _take_frame(self) -> bool:
        if self._nonce or not frames.is_challenge(self._heard):
            return self._take_reply()
        if len(self._heard) < frames.CHALLENGE_BYTES:
            return False
        self._nonce = frames.decode_challenge(bytes(self._heard[: frames.CHALLENGE_BYTES]))
        del self._heard[: frames.CHALLENGE_BYTES]
        self._authenticate()
        return True

    def _take_reply(self) -> bool:
        if len(self._heard) < frames.REPLY_BYTES:
            return False
        reply = frames.decode_reply(bytes(self._heard[: frames.REPLY_BYTES]))
        size = frames.REPLY_BYTES + reply.text_bytes
        if len(self._heard) < size:
            return False
        text = self._heard[frames.REPLY_BYTES : size].decode(errors="replace")
        del self._heard[:size]
        if self.state is State.OPENING:
            self._welcomed(reply, text)
        else:
            self._answered(reply, text)
        return True

    def _authenticate(self) -> None:
        raw = frames.encode_auth(self._token, self._nonce, self._caller)
        assert self._dial.socket is not None
        if self._dial.socket.send(raw, socket.MSG_NOSIGNAL) != len(raw):
            raise WireError(f"{self._dial.where} takes no {len(raw)} bytes")

    def _welcomed(self, reply: frames.Reply, text: str) -> None:
        if reply.code != frames.OK:
            raise WireError(f"{self._dial.where} refused the connection: {text}")
        # whoever listens there now may not be the process that the blob came from
        if not self._nonce or not hmac.compare_digest(
            text.encode(), frames.welcome(self._token, self._nonce, self._caller).encode()
        ):
            raise WireError(f"{self._dial.where} does not prove that it holds the token of the peer's blob")
        assert self._dial.socket is not None
        self._outbox.open(self._dial.socket)
        self.state = State.READY

    def _answered(self, reply: frames.Reply, text: str) -> None:
        sending = self._open.pop(reply.ticket, None)
        if sending is not None and sending.cursor.left:
            self._outbox.settle()  # the answer can be here before the call that sent the last byte has returned
        if sending is None or sending.cursor.left:
            raise WireError(f"{self._dial.where} answers ticket {reply.ticket}, which was not sent to its end")
        self.unanswered -= sending.payload_bytes
        if reply.code == frames.OK:
            self.done.append(Done(reply.ticket, Outcome.LANDED))
        else:
            self.done.append(Done(reply.ticket, Outcome.FAILED_QUIET, f"the target refused: {text}", "refused"))

    def _why(self, error: Exception) -> str:
        if isinstance(error, WireError):
            return str(error)
        text = error.strerror if isinstance(error, OSError) else None
        return f"the connection to {self._dial.where} is lost: {text or error}"

    def _fail(self, sending: Sending) -> None:
        payload = sending.payload_sent
        outcome = Outcome.FAILED_UNKNOWN if payload else Outcome.FAILED_QUIET
        cause = f"{self.why}; {payload} payload bytes of this batch had been sent, none acknowledged"
        self.done.append(Done(sending.ticket, outcome, cause, "connection lost"))
