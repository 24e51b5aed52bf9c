"""The process that an engine belongs to: what a forked child does with its copy must not reach the parent."""

from __future__ import annotations

import ctypes
import os
import weakref

from kvferry.errors import EngineError, ForkError


class Owner:
    """The process that opened an engine."""

    def __init__(self, engine: str) -> None:
        """Remember this process, and the engine's name for errors."""
        self._engine, self._pid = engine, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Refuse use in a forked child. Raises ForkError."""
        if not self.is_here:
            raise ForkError(
                f"this {self._engine} engine was opened in process {self._pid} and used in its fork {os.getpid()}",
                hint="start worker processes with the spawn method, or open an engine after the fork",
            )


def not_open(engine: str) -> EngineError:
    """What a call before `open` or after `close` raises."""
    return EngineError(f"the {engine} engine is not open", hint="call open() first, and nothing after close()")


_never_freed: weakref.WeakSet[object] = weakref.WeakSet()


def keep_in_forks(holder: object) -> None:
    """Never free, in a forked child, what an object holds.

    A native library shuts its connections when its objects are freed. A child shares sockets and sets of descriptors
    with its parent: UCX ends the parent's process as soon as it notices.
    """
    _never_freed.add(holder)


def _forked() -> None:
    for holder in list(_never_freed):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))


os.register_at_fork(after_in_child=_forked)
