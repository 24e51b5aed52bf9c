"""Batches: bounded pieces of a plan, as arrays of rows."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Limits:
    """The most that one batch may hold."""

    rows: int = 16384
    bytes: int = 16 << 20


class Batch(msgspec.Struct, frozen=True, eq=False):
    """Rows to copy: nbytes[i] bytes from address src[i] here to address dst[i] there.

    Attributes:
        src: uint64[N] addresses in this process.
        dst: uint64[N] addresses in the peer.
        nbytes: uint64[N] lengths.
        total_bytes: their sum.
        claim: the peer's claim that grants the destination rows.
        chunk: number of the chunk that the rows belong to.
    """

    src: U64
    dst: U64
    nbytes: U64
    total_bytes: int
    claim: int = 0
    chunk: int = 0

    def __len__(self) -> int:
        return len(self.src)
