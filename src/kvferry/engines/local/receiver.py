"""The target's end of one TCP connection: checks the rows of each batch, then receives them into granted memory."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from kvferry.engines.local import frames
from kvferry.engines.local.iovec import Cursor, row_at, vectors_of
from kvferry.engines.local.loop import Loop
from kvferry.engines.local.syscalls import receive_vectors
from kvferry.engines.local.writers import Writers
from kvferry.errors import WireError
from kvferry.plan.batch import U64, Limits

WAKE_BYTES = 1 << 20
"""How much of a batch must have come before the kernel wakes the thread: a wake-up costs more than a small copy."""
_ROOM_BYTES = 4 << 20
"""What the kernel's buffer must be able to hold when a large batch comes, so that the writer goes on meanwhile."""
_TURN = 16
"""Frames handled before the other connections of the thread have their turn."""
_DRAIN_BYTES = 256 << 10
_NO_WORDS = np.empty(0, np.uint64)


class _EndedError(Exception):
    """The connection is over: closed by the writer, cut here, or replaced."""


class Receiver:
    """Receives the batches of one connection, as a state machine in a thread that it shares with others.

    Not a byte of a batch enters memory before all its rows were found inside the claim's grant. A batch
    that is refused, or cut by a fence, is read to its end and thrown away, so that the connection's other
    claims go on. It never waits: a writer that stops in mid batch holds up nobody but itself.

    All but `cut` and `look_again` runs in the lane's thread.

    Attributes:
        caller: who connected.
    """

    def __init__(
        self,
        connection: socket.socket,
        caller: frames.Caller,
        welcome: str,
        lane: Loop,
        writers: Writers,
        limits: Limits,
        on_change: Callable[[], None],
        on_garbage: Callable[[], None],
    ) -> None:
        self.caller = caller
        self._greeted = False
        self._socket = connection
        self._fd = connection.fileno()
        self._welcome = welcome
        self._lane = lane
        self._writers = writers
        self._limits = limits
        self._on_change = on_change
        self._on_garbage = on_garbage
        self._ended = False
        self._wakes_at = 1
        self._has_room = False
        self._events = 0
        self._head: frames.BatchHeader | None = None
        self._words = _NO_WORDS
        self._cursor: Cursor | None = None
        self._waste = 0
        self._reply = b""
        self._raw = bytearray(frames.BATCH_BYTES)
        self._into = memoryview(self._raw)
        self._next: Callable[[], bool] = self._greet

    def look_again(self) -> None:
        """Begin, or go on when a connection that this one had to wait for has ended. Any thread may call it."""
        self._lane.call(self._step)

    def cut(self, claim: int | None) -> None:
        """Receive no more into memory for this claim; None: end the connection. Any thread may call it."""
        self._lane.call(self.end if claim is None else lambda: self._cut_claim(claim))

    def end(self) -> None:
        """End the connection now; in the lane's thread, or when that has stopped. May be called twice."""
        if self._ended:
            return
        self._ended = True
        self._lane.unwatch(self._fd)
        self._socket.close()
        self._release()
        self._writers.forget_receiver(self)
        self._on_change()

    def _step(self) -> None:
        if self._ended:
            return
        try:
            self._go_on()
        except (_EndedError, OSError):
            self.end()  # the writer learns it from the closed connection, the target needs nothing from it
        except WireError:
            self._on_garbage()
            self.end()
        except BaseException:
            self.end()  # a grant that stays in use would keep every fence of this peer from its end
            raise

    def _go_on(self) -> None:
        try:
            for _ in range(_TURN):
                if not self._next():
                    break
        except BlockingIOError:
            pass
        if self._greeted:
            self._wait()

    def _wait(self) -> None:
        """Ask to be called when enough has come, or when a reply can be sent."""
        events = selectors.EVENT_WRITE if self._reply else selectors.EVENT_READ
        if events != self._events:
            self._lane.watch(self._fd, self._step, events)
            self._events = events
        missing = self._cursor.left if self._cursor is not None else self._waste or len(self._into)
        wakes_at = max(1, min(missing, WAKE_BYTES))
        if wakes_at == WAKE_BYTES and not self._has_room:
            # asking for so much makes the kernel enlarge the buffer, and unlike SO_RCVBUF leaves it free to go on
            self._wake_at(_ROOM_BYTES)
            self._has_room = True
        if wakes_at != self._wakes_at:
            self._wake_at(wakes_at)

    def _wake_at(self, nbytes: int) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        self._wakes_at = nbytes

    def _greet(self) -> bool:
        # our OK proves to the writer that nothing it sent by an earlier attachment can still land
        if not self._writers.is_alone(self):
            return False
        self._greeted = True
        self._reply = frames.encode_reply(frames.OK, 0, self._welcome)
        self._next = self._answer
        return True

    def _read_head(self) -> bool:
        self._fill()
        head = self._head = frames.decode_batch(bytes(self._raw), self._limits)
        self._words = np.empty(2 * head.rows, np.uint64)
        self._into = self._words.view(np.uint8).data
        self._next = self._read_rows
        return True

    def _read_rows(self) -> bool:
        self._fill()
        head = self._head
        assert head is not None
        dst, nbytes = self._rows()
        # each is bounded before they are added, or the sum could wrap round to the right number
        if int(nbytes.max()) > head.total_bytes or int(nbytes.sum()) != head.total_bytes:
            raise WireError(f"a batch claims {head.total_bytes} bytes and its rows add up to something else")
        cursor = Cursor(vectors_of(dst, nbytes), head.total_bytes)
        peer, grants = self.caller.peer, self._writers.grants
        refusal = grants.begin(peer, head.claim, cast("Sequence[int]", dst), cast("Sequence[int]", nbytes))
        if refusal:
            self._refuse(refusal)
        else:
            self._cursor = cursor  # and nothing in between: who has a cursor holds the grant
            self._next = self._receive
        return True

    def _rows(self) -> tuple[U64, U64]:
        half = len(self._words) // 2
        return self._words[:half], self._words[half:]

    def _receive(self) -> bool:
        cursor = self._cursor
        assert cursor is not None
        try:
            count = receive_vectors(self._fd, cursor.window())
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            nbytes = self._rows()[1]
            row = row_at(nbytes, cursor.done)
            self._refuse(f"row {row} of {len(nbytes)} or one after it is not writable memory here (EFAULT)")
            return True
        if not count:
            raise _EndedError
        cursor.advance(count)
        if cursor.left:
            return False
        self._release()
        self._say(frames.OK, "")
        return True

    def _cut_claim(self, claim: int) -> None:
        if self._cursor is not None and self._head is not None and self._head.claim == claim:
            self._refuse(f"a fence on claim {claim} cut this batch after {self._cursor.done} bytes")
            self._step()

    def _refuse(self, reason: str) -> None:
        """Let nothing more of the batch into memory, throw the rest of it away, then answer."""
        assert self._head is not None
        self._waste = self._cursor.left if self._cursor is not None else self._head.total_bytes
        self._release()
        self._next = lambda: self._drain(reason)

    def _drain(self, reason: str) -> bool:
        waste = memoryview(bytearray(min(self._waste, _DRAIN_BYTES)))
        while self._waste:
            self._waste -= self._read_some(waste[: self._waste])
        self._say(frames.REFUSED, reason)
        return True

    def _release(self) -> None:
        if self._cursor is not None and self._head is not None:
            self._cursor = None
            self._writers.grants.end(self.caller.peer, self._head.claim)
            self._on_change()

    def _say(self, code: int, text: str) -> None:
        assert self._head is not None
        self._reply = frames.encode_reply(code, self._head.ticket, text)
        self._next = self._answer

    def _answer(self) -> bool:
        while self._reply:
            self._reply = self._reply[self._socket.send(self._reply, socket.MSG_NOSIGNAL) :]
        self._into, self._words = memoryview(self._raw), _NO_WORDS
        self._next = self._read_head
        return True

    def _fill(self) -> None:
        while len(self._into):
            self._into = self._into[self._read_some(self._into) :]

    def _read_some(self, view: memoryview) -> int:
        count = self._socket.recv_into(view)
        if not count:
            raise _EndedError
        return count
