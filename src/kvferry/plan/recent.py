"""What was computed of late, by key: requests of the same size are planned once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_MISSING: Any = object()
"""None is a result."""


class Recent(Generic[T]):
    """At most `capacity` results; the oldest goes first. May be used by several threads, which may compute twice."""

    def __init__(self, capacity: int = 16) -> None:
        self._capacity = capacity
        self._found: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T], is_small: Callable[[T], bool]) -> T:
        """The result for a key; kept only if it is small, as of large ones the making matters less than the memory."""
        found: T = self._found.get(key, _MISSING)
        if found is _MISSING:
            found = make()
            if is_small(found):
                if len(self._found) >= self._capacity:
                    for oldest in list(self._found)[:1]:  # one step for the interpreter, unlike an iteration
                        self._found.pop(oldest, None)
                self._found[key] = found
        return found
