"""What one connection has to send, in order: by the thread that submits it, or by one that sends for many."""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.engines.local.iovec import Cursor
from kvferry.engines.local.loop import Loop
from kvferry.engines.local.syscalls import send_vectors
from kvferry.engines.seam import Ticket

INLINE_BYTES = 256 << 10
"""A batch so small is sent by the thread that submits it: to wake another one takes longer than that."""
LANE_STEP_BYTES = 8 << 20
"""About the most that a sending thread sends before the other connections have their turn."""


@dataclass
class Sending:
    """A batch on its way.

    Attributes:
        ticket: its ticket.
        head: header and rows; kept, because the cursor holds its address.
        payload_bytes: what follows them.
        cursor: what is still to be sent of both.
    """

    ticket: Ticket
    head: npt.NDArray[np.uint8]
    payload_bytes: int
    cursor: Cursor

    @property
    def payload_sent(self) -> int:
        """Payload bytes that the socket has taken."""
        return max(self.cursor.done - len(self.head), 0)


class Outbox:
    """Nothing waits here: what the socket does not take is sent when it is writable again.

    Attributes:
        problem: what ended the sending in the other thread, which has shut the connection down.
    """

    def __init__(self) -> None:
        self.problem: OSError | None = None
        self._queue: collections.deque[Sending] = collections.deque()
        self._lock = threading.Lock()  # held for one system call at most
        self._socket: socket.socket | None = None
        self._lane: Loop | None = None
        self._lane_has_work = False
        self._closed = False

    def open(self, connection: socket.socket) -> None:
        """The connection may be sent to."""
        self._socket = connection

    def give_to(self, lane: Loop) -> None:
        """Let this thread send from now on what is not small."""
        self._lane = lane

    def waits(self) -> bool:
        """Whether the caller must call `go_on` when the socket is writable."""
        return self._lane is None and bool(self._queue)

    def put(self, sending: Sending) -> None:
        """Add a batch; `go_on` must follow."""
        self._queue.append(sending)

    def go_on(self, budget_bytes: int) -> None:
        """Send about budget_bytes at most, or have it sent.

        Raises:
            OSError: the connection is lost, or the memory to send is none.
        """
        if self._lane is None or self._is_small():
            self._send(budget_bytes)
        if self._lane is not None and self._queue and not self._lane_has_work:
            self._lane_has_work = True
            self._lane.call(self._push)

    def settle(self) -> None:
        """Wait until the system call that is being made, if any, is accounted for in its batch's cursor."""
        with self._lock:
            return

    def close(self, close_socket: Callable[[], None]) -> None:
        """Send nothing more: afterwards no cursor moves. The socket is closed by whoever watches it."""
        with self._lock:
            self._closed = True
            self._queue.clear()
        lane, connection = self._lane, self._socket
        if lane is None or connection is None:
            close_socket()
            return
        self._shut_down()
        fd = connection.fileno()

        def forget() -> None:
            lane.unwatch(fd)
            close_socket()

        lane.call(forget)

    def _is_small(self) -> bool:
        if self._lane_has_work or len(self._queue) != 1:
            return False
        return self._queue[0].cursor.left <= INLINE_BYTES

    def _send(self, budget_bytes: int) -> None:
        while budget_bytes > 0:
            count = self._send_once()
            if not count:
                return
            budget_bytes -= count

    def _send_once(self) -> int:
        """One system call; returns the bytes that were taken, 0 when there are none or the socket is full."""
        with self._lock:
            if self._closed or not self._queue or self._socket is None:
                return 0
            sending = self._queue[0]
            try:
                count = send_vectors(self._socket.fileno(), sending.cursor.window())
            except BlockingIOError:
                return 0
            sending.cursor.advance(count)
            if not sending.cursor.left:
                self._queue.popleft()
            return count

    def _push(self) -> None:
        """In the lane's thread: send what the socket takes, and watch it while something is left."""
        try:
            self._send(LANE_STEP_BYTES)
        except OSError as error:
            self.problem = error
            self._shut_down()
            return
        except BaseException:
            self._shut_down()  # nobody else would notice that nothing is sent any more
            raise
        lane, connection = self._lane, self._socket
        if self._closed or lane is None or connection is None:
            return
        # in this order: what is put in between is seen here, or finds that there is no work and calls again
        self._lane_has_work = False
        if self._queue:
            self._lane_has_work = True
            lane.watch(connection.fileno(), self._push, selectors.EVENT_WRITE)
        else:
            lane.unwatch(connection.fileno())

    def _shut_down(self) -> None:
        # the thread that reads hears of it by the end of the stream
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
