"""The metadata row that travels with a request (first token and so on): read at the source, written at the target."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.errors import ConfigError, InputError


class AuxBuffer(NamedTuple):
    """One buffer of metadata rows.

    Attributes:
        address: of slot 0.
        nbytes: length of the whole buffer.
        item_bytes: bytes of one slot.
    """

    address: int
    nbytes: int
    item_bytes: int


class AuxRows:
    """The rows of all buffers of a rank; slot i of each belongs together."""

    def __init__(self, buffers: Sequence[AuxBuffer]) -> None:
        for number, buffer in enumerate(buffers):
            if buffer.item_bytes <= 0 or buffer.nbytes < buffer.item_bytes or buffer.nbytes % buffer.item_bytes:
                raise ConfigError(
                    f"aux buffer {number}: {buffer.nbytes} bytes are no whole number of rows of {buffer.item_bytes}"
                )
        self._buffers = tuple(buffers)
        self.item_bytes = tuple(buffer.item_bytes for buffer in buffers)
        self.slots = min((buffer.nbytes // buffer.item_bytes for buffer in buffers), default=0)

    def check(self, slot: int, side: str) -> None:
        """Raise InputError for a slot that does not exist; any slot will do where there are no buffers."""
        if self._buffers and not 0 <= slot < self.slots:
            raise InputError(
                f"{side}: aux slot {slot} is outside of the {self.slots} slots",
                hint="pass the row of the metadata buffers that belongs to the request",
            )

    def read(self, slot: int) -> bytes:
        """The row, all buffers one after the other."""
        return b"".join(
            ctypes.string_at(each.address + slot * each.item_bytes, each.item_bytes) for each in self._buffers
        )

    def write(self, slot: int, row: bytes) -> None:
        """Put a row in place; the handshake made sure that its length fits."""
        offset = 0
        for each in self._buffers:
            part = row[offset : offset + each.item_bytes]
            ctypes.memmove(each.address + slot * each.item_bytes, part, len(part))
            offset += each.item_bytes
