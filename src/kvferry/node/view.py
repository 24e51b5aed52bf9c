"""What a room's owner sees of it: written by the control thread only, read by anyone without a lock."""

from __future__ import annotations

import os
import threading
import time

from kvferry.errors import Reason
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
        self.started_s = time.monotonic()
        self.pages_s = 0.0
        self.ended_s = 0.0
        self._event: threading.Event | None = None
        self._fd = -1

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

    def release(self) -> None:
        """The pages are free."""
        self.released = True
        self._notify()

    def _notify(self) -> None:
        event, fd = self._event, self._fd
        if event is not None:
            event.set()
        if fd >= 0:
            os.eventfd_write(fd, 1)

    # -- the owner

    def wait(self, timeout_s: float) -> KVPoll:
        """Block until the room has ended, or for timeout_s."""
        deadline = time.monotonic() + timeout_s
        while self.poll not in TERMINAL:
            self._event = threading.Event()
            rest = deadline - time.monotonic()
            if rest <= 0 or self.poll in TERMINAL:
                break
            self._event.wait(rest)
        self._event = None
        return self.poll

    def fileno(self) -> int:
        """A file descriptor that is readable after a change; made on first use, closed by `close`."""
        if self._fd < 0:
            self._fd = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self._fd

    def close(self) -> None:
        """Close the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
