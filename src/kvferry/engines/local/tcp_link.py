"""The writer's end of a TCP connection: batches straight from memory, each acknowledged by the receiver."""

from __future__ import annotations

import collections
import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.engines.local import frames
from kvferry.engines.local.blob import Blob
from kvferry.engines.local.iovec import Cursor, vectors_of
from kvferry.engines.local.link import State
from kvferry.engines.local.resolve import Resolution
from kvferry.engines.local.syscalls import error_name, send_vectors
from kvferry.engines.seam import Batch, Done, Outcome, Ticket
from kvferry.errors import WireError
from kvferry.ids import PeerId

STEP_BYTES = 4 << 20
"""The most that one `step` sends, so that one peer can't keep the mover from the others."""
_REPLY_READ_BYTES = 64 << 10


@dataclass
class _Sending:
    ticket: Ticket
    head: npt.NDArray[np.uint8]  # kept: the cursor holds its address
    cursor: Cursor


class TcpLink:
    """Sends without waiting. A ticket lands when the receiver, which wrote it, says so.

    A connection that is lost leaves what may still be in the receiver's socket buffer: such tickets end
    FAILED_UNKNOWN; those of which no payload byte was sent end FAILED_QUIET.
    """

    mechanism = "tcp"

    def __init__(self, blob: Blob, me: PeerId, on_resolved: Callable[[], None]) -> None:
        self.state = State.OPENING
        self.why = ""
        self.done: list[Done] = []
        self._hello = frames.encode_auth(blob.token, me)
        self._where = f"{blob.tcp_host} port {blob.tcp_port}"
        self._socket: socket.socket | None = None
        self._stale: list[socket.socket] = []
        self._greeted = False
        self._queue: collections.deque[_Sending] = collections.deque()
        self._sent: dict[Ticket, _Sending] = {}
        self._replies = bytearray()
        self._untried: Resolution | None = None
        if blob.tcp_port:
            self._untried = Resolution(blob.tcp_host, blob.tcp_port, on_resolved)
        else:
            self._lose("the peer does not offer TCP")

    def fileno(self) -> int:
        """The socket, or -1 while there is none."""
        return self._socket.fileno() if self._socket is not None else -1

    def wants_write(self) -> bool:
        """While it connects, and while there is something to send."""
        return self.state is not State.LOST and (not self._greeted or bool(self._queue))

    def step(self) -> None:
        """Connect, send, read replies: whatever can be done now."""
        if self.state is State.LOST:
            return
        self._close_stale()
        try:
            if self._greeted or self._connect():
                self._send()
                self._read()
        except WireError as error:
            self._lose(str(error))
        except OSError as error:
            self._lose(f"the connection to {self._where} is lost: {error.strerror or error}")

    def submit(self, ticket: Ticket, batch: Batch) -> None:
        """Queue a batch and send what the socket takes."""
        raw = frames.encode_batch(len(batch), ticket, batch.claim, batch.total_bytes)
        head = np.frombuffer(raw + batch.dst.tobytes() + batch.nbytes.tobytes(), np.uint8)
        first = np.array([[head.ctypes.data, len(head)]], np.uint64)
        vectors = np.concatenate([first, vectors_of(batch.src, batch.nbytes)])
        cursor = Cursor(vectors, len(head) + batch.total_bytes)
        self._queue.append(_Sending(ticket, head, cursor))
        self.step()

    def close(self) -> None:
        """Close the connection; open tickets end."""
        self._lose("detached")

    def _connect(self) -> bool:
        """Take the next step to a greeted connection; True when the greeting is sent."""
        if self._socket is not None:
            number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._next_address(OSError(number, f"errno {number}"))
            return self._greet()
        return self._next_address(None)

    def _next_address(self, problem: OSError | None) -> bool:
        self._set_aside()
        assert self._untried is not None
        addresses = self._untried.addresses
        if addresses is None:
            return False
        while addresses:
            family, address = addresses.pop(0)
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._socket.connect(address)
            except BlockingIOError:
                return False
            except OSError as error:
                problem = error
                self._set_aside()
                continue
            return self._greet()
        reason = self._untried.why or (error_name(problem) if problem else "no address")
        raise WireError(f"{self._where} can't be reached: {reason}")

    def _set_aside(self) -> None:
        # not closed yet: a new socket with the same number would be taken for the one that is being waited on
        if self._socket is not None:
            self._stale.append(self._socket)
            self._socket = None

    def _close_stale(self) -> None:
        while self._stale:
            self._stale.pop().close()

    def _greet(self) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(self._hello, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        self._greeted = True
        return True

    def _send(self) -> None:
        budget = STEP_BYTES
        while self._queue and budget > 0 and self.state is State.READY:
            sending = self._queue[0]
            self._sent[sending.ticket] = sending
            try:
                count = send_vectors(self.fileno(), sending.cursor.window())
            except BlockingIOError:
                return
            sending.cursor.advance(count)
            budget -= count
            if not sending.cursor.left:
                self._queue.popleft()

    def _read(self) -> None:
        assert self._socket is not None
        try:
            raw = self._socket.recv(_REPLY_READ_BYTES)
        except BlockingIOError:
            return
        if not raw:
            raise WireError(f"{self._where} has closed the connection")
        self._replies += raw
        while len(self._replies) >= frames.REPLY_BYTES:
            reply = frames.decode_reply(bytes(self._replies[: frames.REPLY_BYTES]))
            size = frames.REPLY_BYTES + reply.text_bytes
            if len(self._replies) < size:
                return
            text = self._replies[frames.REPLY_BYTES : size].decode(errors="replace")
            del self._replies[:size]
            self._hear(reply, text)

    def _hear(self, reply: frames.Reply, text: str) -> None:
        if self.state is State.OPENING:
            if reply.code != frames.OK:
                raise WireError(f"{self._where} refused the connection: {text}")
            self.state = State.READY
            return
        sending = self._sent.pop(reply.ticket, None)
        if sending is None or sending.cursor.left:
            raise WireError(f"{self._where} answers ticket {reply.ticket}, which was not sent to its end")
        if reply.code == frames.OK:
            self.done.append(Done(reply.ticket, Outcome.LANDED))
        else:
            self.done.append(Done(reply.ticket, Outcome.FAILED_QUIET, f"the target refused: {text}", "refused"))

    def _lose(self, why: str) -> None:
        if self.state is State.LOST:
            return
        self.state, self.why = State.LOST, why
        self._set_aside()
        self._close_stale()
        for sending in {**self._sent, **{sending.ticket: sending for sending in self._queue}}.values():
            self._fail(sending)
        self._sent.clear()
        self._queue.clear()

    def _fail(self, sending: _Sending) -> None:
        payload = sending.cursor.done - len(sending.head)
        outcome = Outcome.FAILED_UNKNOWN if payload > 0 else Outcome.FAILED_QUIET
        cause = f"{self.why}; {max(payload, 0)} payload bytes of this batch had been sent, none acknowledged"
        self.done.append(Done(sending.ticket, outcome, cause, "connection lost"))
