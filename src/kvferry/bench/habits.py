"""How a scheduler waits for a room: the habits that are measured."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence

from kvferry.api import KVPoll
from kvferry.api.base import BaseRoom
from kvferry.bench.failure import BenchError

NAP_S = 200e-6
BUSY_S = 300e-6
ENDED = frozenset({KVPoll.Success, KVPoll.Failed})


def nap() -> None:
    """Sleep for 200 microseconds."""
    time.sleep(NAP_S)


def busy() -> None:
    """Run pure Python for 300 microseconds, as a scheduler does that plans its next batch; the GIL is kept."""
    until_s = time.perf_counter() + BUSY_S
    while time.perf_counter() < until_s:
        pass


PAUSES: dict[str, Callable[[], None]] = {"yield": os.sched_yield, "nap": nap, "busy": busy}
"""What a polling scheduler does between two polls."""
WAITS = ("wait", *PAUSES)
"""All habits; "wait" blocks in wait() or on fileno() instead of polling."""


def until_success(rooms: Sequence[BaseRoom], habit: str, limit_s: float) -> None:
    """Wait until all rooms have succeeded.

    Raises:
        KVTransferError: one has failed.
        BenchError: one has not ended within limit_s.
    """
    deadline_s = time.monotonic() + limit_s
    if habit == "wait":
        for room in rooms:
            room.wait(max(0.0, deadline_s - time.monotonic()))
    else:
        _poll(rooms, ENDED, PAUSES[habit], deadline_s)
    for room in rooms:
        require(room, room.poll(), {KVPoll.Success}, limit_s)


def until_claimed(rooms: Sequence[BaseRoom], habit: str, limit_s: float) -> None:
    """Wait until the decode side has named the pages of all these senders' rooms. Raises as until_success."""
    wanted = {KVPoll.WaitingForInput, *ENDED}
    deadline_s = time.monotonic() + limit_s
    if habit == "wait":
        for room in rooms:
            _select(room, wanted, deadline_s)
    else:
        _poll(rooms, wanted, PAUSES[habit], deadline_s)
    for room in rooms:
        require(room, room.poll(), {KVPoll.WaitingForInput, KVPoll.Success}, limit_s)


def pass_time(habit: str, seconds: float) -> None:
    """Let time pass in the habit's own way, as if the scheduler had other rooms to look after."""
    if habit == "wait":
        time.sleep(seconds)
        return
    for _ in _turns(PAUSES[habit], time.monotonic() + seconds):
        pass


def require(room: BaseRoom, found: KVPoll, wanted: set[KVPoll], limit_s: float) -> None:
    """Refuse any other state. Raises KVTransferError or BenchError."""
    if found in wanted:
        return
    if found is KVPoll.Failed:
        room.failure_exception()
    number = getattr(room, "bootstrap_room", "?")
    raise BenchError(
        f"room {number} is {found.name} after {limit_s:g} s, {', '.join(sorted(p.name for p in wanted))} was awaited",
        hint="is the machine overloaded?",
    )


def _poll(
    rooms: Sequence[BaseRoom], wanted: set[KVPoll] | frozenset[KVPoll], pause: Callable[[], None], deadline_s: float
) -> None:
    left = list(rooms)
    for _ in _turns(pause, deadline_s):
        left = [room for room in left if room.poll() not in wanted]
        if not left:
            return


def _turns(pause: Callable[[], None], deadline_s: float) -> Iterator[None]:
    """One turn after the other with a pause between them, until the deadline."""
    while time.monotonic() < deadline_s:
        yield
        pause()


def _select(room: BaseRoom, wanted: set[KVPoll], deadline_s: float) -> None:
    fd, waiter = room.fileno(), select.poll()  # not select(): descriptors of a large process are above its 1024
    waiter.register(fd, select.POLLIN)
    while room.poll() not in wanted and (left_s := deadline_s - time.monotonic()) > 0:
        if waiter.poll(left_s * 1e3):
            os.eventfd_read(fd)
