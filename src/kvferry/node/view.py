"""What a room's owner sees of it: written by the control thread only, read by anyone without a lock."""

from __future__ import annotations

import os
import threading
import time

from kvferry.errors import ProtocolError, Reason
from kvferry.ids import KVPoll

TERMINAL = frozenset({KVPoll.Success, KVPoll.Failed})


class RoomView:
    """The visible state of one room on one rank.

    Attributes:
        room: the room number.
        poll: the state; terminal states never change.
        reason: why it failed.
        foreign: the reason was noticed by another process.
        released: its pages may be used for something else.
        prefix_tokens: prefill side: what the decode side has already, once it said so; -1 before.
        bytes_landed: bytes that have landed.
        claims_success: prefill side: whether all claims got all they wanted; None while one has not ended.
        started_s, pages_s, ended_s: time.monotonic() of the start, of the pages being named, of the end; 0 = not yet.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.poll = KVPoll.Bootstrapping
        self.reason: Reason | None = None
        self.foreign = False
        self.released = False
        self.prefix_tokens = -1
        self.bytes_landed = 0
        self.claims_success: bool | None = None
        self.started_s = time.monotonic()
        self.pages_s = 0.0
        self.ended_s = 0.0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._fd = -1
        self._closed = False

    # -- the control thread

    def update(self, poll: KVPoll, reason: Reason | None, foreign: bool, bytes_landed: int) -> None:
        """Take a newer state; a reader sees the facts before the state that they belong to."""
        if self.poll in TERMINAL or (poll == self.poll and bytes_landed == self.bytes_landed):
            return
        self.bytes_landed, self.reason, self.foreign = bytes_landed, reason, foreign
        if poll == self.poll:
            return
        if poll in TERMINAL:
            self.ended_s = time.monotonic()
        self.poll = poll
        self._notify()

    def end(self, reason: Reason) -> None:
        """Fail a room that never came to the book: nothing was shown to anyone."""
        self.released = True
        self.update(KVPoll.Failed, reason, foreign=False, bytes_landed=0)

    def release(self) -> None:
        """The pages are free."""
        self.released = True
        if self.poll in TERMINAL:  # else the end comes next, and is told
            self._notify()

    def _notify(self) -> None:
        with self._lock:  # close() may run at the same time; a reused descriptor is not ours to write
            if self._waiting:
                self._changed.notify_all()
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    # -- the owner, on any number of threads

    def wait(self, timeout_s: float) -> KVPoll:
        """Block until the room has ended, or for timeout_s."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self.poll in TERMINAL, timeout_s)
            finally:
                self._waiting -= 1
        return self.poll

    def fileno(self) -> int:
        """A file descriptor that is readable after a change; made on first use, closed by `close`.

        Raises:
            ProtocolError: it was closed.
        """
        with self._changed:
            if self._closed:
                raise ProtocolError(f"room {self.room}: fileno() after clear()", hint="ask before the room is cleared")
            if self._fd < 0:
                self._fd = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._fd

    def close(self) -> None:
        """Close the descriptor."""
        with self._changed:
            fd, self._fd, self._closed = self._fd, -1, True
            if fd >= 0:
                os.close(fd)
