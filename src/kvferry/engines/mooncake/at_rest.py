"""Writing by TCP without turning in a loop meanwhile.

The library's blocking calls ask for the state again and again without a pause, which takes a processor for as long as
the kernel copies; where there are few, it is the one that the library's own threads would copy with. So a long write
is begun and left alone: the caller's thread sleeps for most of what such a write took lately, then asks from time to
time for its last row, which is a transfer of its own. When that one is there the others are, or nearly so, and the
library is asked for them with its call that blocks.

`transfer_check_status` looks at a transfer's first row only and calls it done: here it is asked for one row, never for
a batch.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from kvferry.engines.mooncake.quiet import LIMITS

PIECE_BYTES = 1 << 20
"""Longer rows are cut: of each connection one row is under way, and rows that fill the kernel's buffers are copied from
caches that they have fallen out of."""

FROM_BYTES = 1 << 20
"""A shorter write is over before a sleeping thread would run again."""

SHARE, REST_MOST_S = 0.8, 0.05
"""What part of the time that a write should take is slept through, and no more than this: the last one may have waited
for a peer that was stopped."""

NAP_S, NAP_SHARE = 2e-4, 1 / 100
"""How long it sleeps before it asks again: at least so many seconds, and this part of what has passed."""

_FASTER = 1.25
"""How much faster the next write is thought to be when one was over before it was asked for."""


class Rows(NamedTuple):
    """What is written, as the library wants it: addresses here, addresses there, and bytes."""

    src: list[int]
    dst: list[int]
    nbytes: list[int]


class Pace:
    """How fast the last writes to a peer were."""

    def __init__(self) -> None:
        # the fastest of some counts: after one that was disturbed the next would oversleep
        self._bytes_per_s: deque[float] = deque(maxlen=4)

    def rest_s(self, nbytes: int) -> float:
        """How long nobody needs to ask for a write of so many bytes; 0.0 before the first."""
        return min(SHARE * nbytes / max(self._bytes_per_s), REST_MOST_S) if self._bytes_per_s else 0.0

    def saw(self, nbytes: int, seconds: float, *, overslept: bool) -> None:
        """Remember a write.

        Args:
            nbytes: how many bytes.
            seconds: what it took.
            overslept: it was over when it was first asked for, and may have been for long.
        """
        self._bytes_per_s.append(nbytes / max(seconds, 1e-6) * (_FASTER if overslept else 1.0))


def cut(rows: Rows) -> Rows:
    """Cut long rows into pieces, of PIECE_BYTES where that does not make more rows than the library takes at once."""
    most = PIECE_BYTES
    if max(rows.nbytes) <= most:
        return rows
    while sum(-(-nbytes // most) for nbytes in rows.nbytes) > LIMITS.rows:
        most *= 2
    pieces = (
        (src + begin, dst + begin, min(most, nbytes - begin))
        for src, dst, nbytes in zip(*rows, strict=True)
        for begin in range(0, nbytes, most)
    )
    return Rows(*map(list, zip(*pieces, strict=True)))


def write(engine: Any, session: str, rows: Rows, pace: Pace, timeout_s: float) -> int:
    """Write rows; returns when the peer has acknowledged each, or when not all will be.

    Args:
        engine: the library's.
        session: the peer's.
        rows: at least one that is not empty, and no more than the library takes at once.
        pace: of that peer.
        timeout_s: when the library gives a write up, beside a nanosecond for each byte.

    Returns:
        0 when all are there; all else is a failure, after which the library may go on writing.
    """
    began, nbytes, rows = time.monotonic(), sum(rows.nbytes), cut(rows)
    others = Rows(*(numbers[:-1] for numbers in rows))
    batch = engine.batch_transfer_async_write(session, *others) if others.src else None
    if batch == 0:
        return -1
    last = engine.transfer_submit_write(session, *(numbers[-1] for numbers in rows))
    code, naps = _wait_for_one(engine, last, pace.rest_s(nbytes), began + timeout_s + nbytes / 1e9)
    if batch is not None:
        code = engine.get_batch_transfer_status([batch]) or code  # also after a failure: it is what frees the batch
    if not code:
        pace.saw(nbytes, time.monotonic() - began, overslept=not naps)
    return int(code)


def _wait_for_one(engine: Any, transfer: int, rest_s: float, until: float) -> tuple[int, int]:
    """Wait for a transfer of one row: the library's code, 0 for success, and how often it was not there yet."""
    if not transfer:
        return -1, 0
    began, naps = time.monotonic(), 0
    time.sleep(rest_s)
    while not (state := engine.transfer_check_status(transfer)):
        now = time.monotonic()
        if now > until:
            return -1, naps
        time.sleep(max(NAP_S, NAP_SHARE * (now - began)))
        naps += 1
    return (0 if state == 1 else state), naps
