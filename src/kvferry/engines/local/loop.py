"""The engine's own threads: a small reactor over the sockets and pidfds of peers."""

from __future__ import annotations

import collections
import logging
import selectors
import threading
from collections.abc import Callable

from kvferry.engines.local.waker import Waker

_logger = logging.getLogger(__name__)

SWEEP_S = 0.5


class Loop:
    """Calls back when a descriptor is ready.

    `watch` and `unwatch` belong to its thread, or come before `start`. A callback that raises loses its
    descriptor and is logged; the others go on.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._sweeps: list[Callable[[], bool]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._selector.register(self._waker.fileno(), selectors.EVENT_READ, self._waker.clear)

    def watch(self, fd: int, callback: Callable[[], None], events: int = selectors.EVENT_READ) -> None:
        """Call back whenever fd is ready for these events (selectors.EVENT_*); again for the same fd replaces."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, callback)
        else:
            self._selector.register(fd, events, callback)

    def unwatch(self, fd: int) -> None:
        """Watch it no more; an unknown descriptor is ignored, and all are when the loop has stopped."""
        if fd in (self._selector.get_map() or ()):
            self._selector.unregister(fd)

    def sweep(self, callback: Callable[[], bool]) -> None:
        """Call back about every 0.5 s for as long as it returns True, and after each event."""
        self._sweeps.append(callback)

    def call(self, callback: Callable[[], None]) -> None:
        """Run something in the loop's thread, from any thread."""
        self._calls.append(callback)
        self._waker.set()

    def pause(self, seconds: float) -> None:
        """Sleep, unless the loop is stopped meanwhile."""
        self._stopping.wait(seconds)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, when what was called is done, and free the descriptors; what was watched is left open."""
        self._stopping.set()
        self._waker.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        self._waker.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            waiting = [sweep() for sweep in self._sweeps]
            for key, _ in self._selector.select(SWEEP_S if any(waiting) else None):
                self._guarded(key.data, key.fd)
            self._run_calls()
        self._run_calls()

    def _run_calls(self) -> None:
        while self._calls:
            self._guarded(self._calls.popleft(), -1)

    def _guarded(self, callback: Callable[[], None], fd: int) -> None:
        # an earlier callback of this round may have closed the descriptor
        if fd >= 0 and fd not in self._selector.get_map():
            return
        try:
            callback()
        except Exception:
            _logger.exception("local engine: a peer's event could not be handled; its connection is ignored")
            self.unwatch(fd)
