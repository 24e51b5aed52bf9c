"""Wakes a thread that waits on descriptors."""

from __future__ import annotations

import os
import threading


class Waker:
    """An eventfd; `set` may be called by any thread, also after `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to wait on; -1 when closed."""
        return self._fd

    def set(self) -> None:
        """Make the descriptor readable."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next `set`."""
        with self._lock:
            if self._fd >= 0:
                try:
                    os.eventfd_read(self._fd)
                except BlockingIOError:
                    return

    def close(self) -> None:
        """Free the descriptor; may be called twice."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
