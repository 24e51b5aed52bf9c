"""What peers write to: an instance of the library per connection, so that one peer can be shut out for good.

The libraries' targets do not tell writers apart, and can't refuse one. But what arrives at an instance ends with it.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from kvferry.engines.seam import Region
from kvferry.errors import EngineError

MAIN = 0
"""The epoch of whoever was given the plain blob."""


class Registers(Protocol):
    """An instance of a library."""

    def register(self, regions: tuple[Region, ...]) -> None:
        """Replace the registered regions; raises EngineError, then none is registered."""


One = TypeVar("One", bound=Registers)
Said = TypeVar("Said")


class Served(ABC, Generic[One, Said]):
    """Instances by the epoch of the connection that was told of them; epochs are this process's own numbers.

    Thread-safe: connections are told on another thread than the engine's.

    Attributes:
        main: the instance of the plain blob.
        rebuilds: how often it was made anew.
    """

    def __init__(self, engine: str) -> None:
        """Start the main instance; `engine` is the engine's name."""
        self._log = logging.getLogger(f"kvferry.{engine}")
        self._lock = threading.Lock()
        self._regions: tuple[Region, ...] = ()
        self.rebuilds = 0
        self.main: One = self._new()
        self._open: dict[int, One] = {MAIN: self.main}
        self._shut: dict[int, tuple[Said, str]] = {}  # what the peer was told, and why it is not proven to be out
        self._on_main: set[int] = set()

    def __len__(self) -> int:
        """How many instances there are."""
        return len(self._open)

    # -- what is the library's own

    @abstractmethod
    def _new(self) -> One:
        """Start an instance; raises EngineError or OSError."""

    @abstractmethod
    def _end(self, instance: One) -> str:
        """End an instance, so that nothing of its writer lands any more; why that is not proven, or ""."""

    @abstractmethod
    def _forget(self, instance: One) -> None:
        """End an instance of which nothing has to be proven."""

    @abstractmethod
    def _blob_of(self, instance: One) -> Said:
        """What a peer is told of an instance."""

    def _why_never(self) -> str:
        """Why no peer can be shut out at all, or ""."""
        return ""

    def _sweep(self) -> None:
        """Before a further instance is made."""

    # -- the engine's calls

    def blob(self, epoch: int) -> Said:
        """What the peer of a connection is told; makes an instance for it if there is none.

        Where none can be made it is told of the main one, and can't be shut out alone.
        """
        with self._lock:
            if epoch in self._shut:
                return self._shut[epoch][0]
            if epoch not in self._open and epoch not in self._on_main and not self._why_never():
                self._sweep()
                self._make(epoch)
            return self._blob_of(self._open.get(epoch, self.main))

    def register(self, regions: tuple[Region, ...]) -> None:
        """Replace the registered regions of all instances.

        Raises:
            EngineError: a region, which it names, can't be registered; then none is.
        """
        with self._lock:
            self._regions = ()
            try:
                for instance in self._open.values():
                    instance.register(regions)
            except EngineError:
                for instance in self._open.values():
                    instance.register(())
                raise
            self._regions = regions

    def shut_out(self, epoch: int) -> str:
        """End what the peer of a connection writes to; nothing of it lands any more when this returns "".

        Returns:
            Why that is not proven, or "".
        """
        with self._lock:
            if why_never := self._why_never():
                return why_never
            if epoch in self._shut:
                return self._shut[epoch][1]
            if epoch not in self._open and epoch not in self._on_main:
                self._make(epoch)  # nothing was told yet: what is told later must lead nowhere
            if epoch not in self._open:
                return "no instance of its own could be made for it"
            instance = self._open.pop(epoch)
            blob = self._blob_of(instance)
            self._shut[epoch] = blob, "what it writes to could not be ended"
            why = self._end(instance)
            self._shut[epoch] = blob, why
            return why

    def forget(self, epoch: int) -> None:
        """End an instance that no peer needs any more; the main one stays."""
        with self._lock:
            self._on_main.discard(epoch)
            if epoch != MAIN and epoch in self._open:
                self._forget(self._open.pop(epoch))

    def close(self) -> None:
        """End all."""
        with self._lock:
            for instance in self._open.values():
                self._forget(instance)

    def _make(self, epoch: int) -> None:
        instance = None
        try:
            instance = self._new()
            instance.register(self._regions)
            self._open[epoch] = instance
        except (EngineError, OSError):
            self._log.exception("connection %d shares an instance with others", epoch)
            if instance is not None:
                self._forget(instance)
            self._on_main.add(epoch)
