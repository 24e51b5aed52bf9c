"""When nothing of a failed batch can land any more, for transfers by TCP.

A transfer that the library reports as failed goes on: queued rows are still sent, and what was sent already lies in
the two kernels until the target, which may be stopped, reads it. So the writer

1. destroys the engine instance that had the batch; no row is begun any more, each connection is closed,
   and each has at most one row under way, since the library sends the next one after the acknowledgement only;
2. waits until the target's kernel has acknowledged the ends of these connections: then all bytes are there;
3. reads from the target, with a new instance, again and again. One thread of the target serves all connections in
   turns, with at most 64 KiB of each in one turn, so that an answer to the n-th read shows that each old connection
   had n turns. After as many turns as a row can need, nothing is left.

A target that is stopped fails step 2 or 3, and so does one that can't be reached: then there is no proof. One that
refuses connections where its data arrived is gone, with its process or because it has shut this writer out, and nothing
reads there any more.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection

from kvferry.engines.mooncake.library import SLICE_BYTES
from kvferry.engines.mooncake.sockets import unacknowledged
from kvferry.plan.batch import Limits

LIMITS = Limits(rows=1024, bytes=16 << 20)
"""More rows at once are refused by the library, which goes on writing some of them or never recovers."""

TURNS = 2 * (LIMITS.bytes // SLICE_BYTES + 2)
"""Twice what the longest row can need."""

SETTLE_S = 0.2
ACKNOWLEDGE_S = 5.0
CONNECT_S = 1.0
_LOOK_S = 0.01


def is_gone(session: str, ports: Collection[int]) -> bool:
    """Whether a target refuses connections at the ports where its data arrived."""
    host = session.rpartition(":")[0].strip("[]")
    return bool(ports) and all(_is_refused(host, port) for port in ports)


def is_drained(ports: Collection[int], reads: Callable[[], bool]) -> bool:
    """Whether nothing of a destroyed instance can land at a target any more; takes some tenths of a second.

    Args:
        ports: where the target takes data connections.
        reads: reads from the target by a new instance; False when that fails.
    """
    if not ports or not _acknowledged(ports):
        return False
    turns, until = 0, time.monotonic() + SETTLE_S
    while turns < TURNS or time.monotonic() < until:
        if not reads():
            return False
        turns += 1
    return True


def _is_refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):
        return False
    return False


def _acknowledged(ports: Collection[int]) -> bool:
    until = time.monotonic() + ACKNOWLEDGE_S
    while (under_way := unacknowledged(ports)) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    return under_way is False
