"""A logical cache in a file that several processes map: where ranks put together what their pools hold."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvferry.serve.share import FIELDS, UNWRITTEN, Logical

Shape = tuple[int, int, int, int, int]
"""Layers, 2, KV heads, tokens, head_dim."""


class CacheFile:
    """The logical cache of one side.

    Attributes:
        values: float16[layers, 2, KV heads, tokens, head_dim], shared by all who have opened the file.
    """

    def __init__(self, path: Path, shape: Shape) -> None:
        """Map a file that `create` made; it may be unlinked afterwards. Raises OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.values: Logical = np.memmap(path, np.float16, "r+", shape=shape)

    @classmethod
    def create(cls, path: Path, shape: Shape) -> None:
        """Make a file in which nothing is written yet. Raises OSError."""
        layer = np.full(shape[1:], UNWRITTEN, np.uint16)
        with path.open("xb") as file:
            for _ in range(shape[0]):
                file.write(layer.data)

    @contextmanager
    def locked(self) -> Iterator[Logical]:
        """The values, while no other process has them by this call: to compare and write in one step."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield self.values
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def missing(self) -> str:
        """Say which element nobody has written; "" if all are there."""
        holes = np.argwhere((self.values.view(np.uint16) == UNWRITTEN).any(axis=-1))
        if not len(holes):
            return ""
        layer, field, head, token = (int(number) for number in holes[0])
        return f"layer {layer}, head {head}, token {token}, {FIELDS[field]} and {len(holes) - 1} more elements"

    def close(self) -> None:
        """Give the lock's descriptor back; the mapping goes with its last reference."""
        os.close(self._file)
