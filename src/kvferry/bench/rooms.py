"""`kvferry bench rooms`: latency of small requests by a scheduler's habit, rooms per second, cost of idle and peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from kvferry.bench.children import Crew
from kvferry.bench.machine import surroundings
from kvferry.bench.peers import PeerCost, peer_cost
from kvferry.bench.rooms_side import Setup
from kvferry.bench.rooms_spec import HABITS, RoomsSpec, check
from kvferry.bench.transfer_spec import settings_of

SIDE = "kvferry.bench.rooms_side"
SAMPLE_LIMIT_S = 1.0
"""Longest mean time per sample."""


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds from just before send() until the decode side's scheduler sees Success."""

    p50_ms: float
    p99_ms: float
    samples: int


class Idle(msgspec.Struct, frozen=True):
    """What a node that is connected to one peer costs while nothing happens: a process that has only kvferry.

    Attributes:
        cpu_percent: of one processor.
        rss_mb, pss_mb: memory, 10**6 bytes.
    """

    cpu_percent: float
    rss_mb: float
    pss_mb: float


class RoomsReport(msgspec.Struct, frozen=True):
    """Everything that was measured; what was left out is empty or None.

    Attributes:
        spec: what was asked for.
        latency: by mode.
        rooms_per_s: with `window` requests in flight, both sides polling with sched_yield between polls.
        idle: of both sides.
        peers: by the side whose memory was read.
        bytes_equal: whether every byte was right; a report with a wrong one is never made.
        engine_info: what the prefill side's engine says: the mechanism really used, and why.
        machine: load average at the start, processors, versions, settings that are not the defaults.
    """

    spec: RoomsSpec
    latency: dict[str, Latency]
    rooms_per_s: float | None
    idle: dict[str, Idle]
    peers: dict[str, PeerCost]
    bytes_equal: bool
    engine_info: dict[str, Any]
    machine: dict[str, Any]


def measure(spec: RoomsSpec, say: Callable[[str], None], command: Sequence[str] = ()) -> RoomsReport:
    """Measure; arguments and errors as of `transfer.measure`."""
    check(spec)
    machine = surroundings(settings_of(spec.mechanism, spec.digest))
    with _Pair(spec, command, spec.window + 1) as pair:
        latency = {}
        for mode in spec.modes:
            latency[mode] = pair.latency(mode)
            say(f"{mode}: p50 {latency[mode].p50_ms:.3f} ms, p99 {latency[mode].p99_ms:.3f} ms")
        rooms_per_s = pair.rooms_per_s() if spec.rooms else None
        if rooms_per_s is not None:
            say(f"{rooms_per_s:.0f} rooms/s, {spec.window} in flight")
        engine_info = pair.engine_info()
    idle: dict[str, Idle] = {}
    if spec.idle_s:
        say(f"two idle nodes for {spec.idle_s:g} s")
        with _Pair(spec, command, 2) as pair:
            idle = pair.idle()
    sides = ("decode", "prefill") if spec.peers else ()
    peers = {side: peer_cost(spec, side, say, command) for side in sides}
    return RoomsReport(spec, latency, rooms_per_s, idle, peers, True, engine_info, machine)


class _Pair:
    """A prefill and a decode process."""

    def __init__(self, spec: RoomsSpec, command: Sequence[str], pages: int) -> None:
        self._spec = spec
        self._crew = Crew(command)
        self._next_room = 1
        self._setup = Setup(spec.engine, spec.mechanism, spec.request_bytes, pages, spec.digest)

    def __enter__(self) -> _Pair:
        try:
            self._prefill = self._crew.start("prefill", f"{SIDE}:PrefillSide", self._setup)
            self._decode = self._crew.start("decode", f"{SIDE}:DecodeSide", self._setup)
            self._endpoint = self._crew.ready(self._prefill)["endpoint"]
            self._crew.ready(self._decode)
        except BaseException as error:
            self._crew.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._crew.__exit__(kind, *rest)

    def latency(self, mode: str) -> Latency:
        """Milliseconds from send to Success in one mode."""
        habit, count = HABITS[mode], self._spec.warmup + self._spec.samples
        begins, ends = self._both(
            "one_by_one", count, SAMPLE_LIMIT_S, habit=habit.name, switch_interval_s=habit.switch_interval_s
        )
        waits_ms = 1e3 * (np.asarray(ends) - np.asarray(begins))[self._spec.warmup :]
        p50, p99 = (float(value) for value in np.percentile(waits_ms, (50, 99)))
        return Latency(p50, p99, len(waits_ms))

    def rooms_per_s(self) -> float:
        """Requests per second with many in flight."""
        spec = self._spec
        self._both("many", spec.window, SAMPLE_LIMIT_S, window=spec.window)  # warm-up
        begin_s, end_s = self._both("many", spec.rooms, SAMPLE_LIMIT_S, window=spec.window)
        return float(spec.rooms / (end_s - begin_s))

    def idle(self) -> dict[str, Idle]:
        """What both sides cost while nothing happens, after one request."""
        self._both("one_by_one", 1, SAMPLE_LIMIT_S, habit="wait", switch_interval_s=None)
        sides = {"prefill": self._prefill, "decode": self._decode}
        for child in sides.values():
            self._crew.begin(child, "idle", seconds=self._spec.idle_s)
        limit_s = self._spec.idle_s + 60
        percent = {side: self._crew.answer(child, "idle", limit_s) for side, child in sides.items()}
        memory = {side: self._crew.ask(child, "memory") for side, child in sides.items()}
        return {
            side: Idle(percent[side], memory[side]["rss"] * 1024 / 1e6, memory[side]["pss"] * 1024 / 1e6)
            for side in sides
        }

    def engine_info(self) -> dict[str, Any]:
        """What the prefill side's engine says of itself."""
        info: dict[str, Any] = self._crew.ask(self._prefill, "info")
        return info

    def _both(self, what: str, count: int, limit_s: float, **arguments: Any) -> tuple[Any, Any]:
        """Have both sides go through `count` rooms; returns what prefill and decode say of it."""
        first, self._next_room = self._next_room, self._next_room + count
        arguments |= {"first_room": first, "count": count}
        self._crew.begin(self._decode, what, endpoint=self._endpoint, **arguments)
        self._crew.begin(self._prefill, what, **arguments)
        limit_s = 60 + limit_s * count
        received = self._crew.answer(self._decode, what, limit_s)
        return self._crew.answer(self._prefill, what, limit_s), received
