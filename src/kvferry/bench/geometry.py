"""What a measured round moves: layouts of all ranks, their page lists, the bytes before and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.layout import Layout

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class Share(NamedTuple):
    """What one rank has of one request.

    Attributes:
        rank: index of the rank in its side's layouts.
        room: which of the requests in flight.
        pages: int32[P] pages of the main space, in order.
        states: int32[P] pages of each other space.
    """

    rank: int
    room: int
    pages: I32
    states: Mapping[str, I32]


class Geometry(Protocol):
    """Made in both processes from the same options; neither asks the planner.

    Attributes:
        tokens: tokens of each request; None leaves them to its pages.
    """

    tokens: int | None

    def layouts(self, side: str) -> list[Layout]:
        """The unbound layout of each rank of a side; the memory of one rank is one pool."""
        ...

    def pool_bytes(self, side: str) -> list[int]:
        """Bytes of each rank's pool."""
        ...

    def shares(self, side: str) -> list[Share]:
        """The page lists of all ranks and requests."""
        ...

    def begin(self, side: str, pools: Sequence[U8]) -> None:
        """Write what the pools of a side hold before the first round."""
        ...

    def fill(self, pools: Sequence[U8], round_number: int) -> None:
        """Write a round's bytes into the prefill pools."""
        ...

    def check(self, pools: Sequence[U8], round_number: int) -> str:
        """Compare every byte of the decode pools after a round; what is wrong, in words, or ""."""
        ...


def pool_bytes_of(layout: Layout) -> int:
    """Bytes that an unbound layout needs in one buffer, in whole cache lines."""
    end = max((tensor.address + tensor.nbytes for tensor in layout.tensors), default=0)
    return -(-max(end, 1) // 64) * 64
