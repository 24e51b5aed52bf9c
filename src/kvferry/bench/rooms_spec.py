"""What `kvferry bench rooms` is told, checked."""

from __future__ import annotations

import resource
from typing import NamedTuple

import msgspec

from kvferry.bench.transfer_spec import (
    ROW_BYTES,
    at_least,
    check_engine,
    check_memory,
    chosen,
    settings_of,
)
from kvferry.config import DIGESTS
from kvferry.errors import InputError

SHORT_SWITCH_S = 0.0005
FILES_BESIDES = 200
"""Descriptors of a process that do not belong to a peer, with a reserve."""
HUB_FILES = 8
"""Descriptors per connected peer in one node: 6 at a decode node on cross-memory attach."""
CROWD_FILES = 40
"""Descriptors per node in a process of many connected nodes: 18 to 28."""


class Habit(NamedTuple):
    """A scheduler's way of waiting, and Python's switch interval with it; None leaves it as it is."""

    name: str
    switch_interval_s: float | None = None


HABITS = {
    "wait": Habit("wait"),
    "nap": Habit("nap"),
    "yield": Habit("yield"),
    "busy": Habit("busy"),
    "busy_short_switch": Habit("busy", SHORT_SWITCH_S),
}
"""The modes that latency is measured in, by name."""


class RoomsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement; the fields are the options of the command.

    Attributes:
        engine: name of the transfer engine.
        mechanism: option "mechanism" of the engine; None leaves it to the engine.
        request_bytes: bytes of one request: one page.
        modes: names in HABITS.
        samples: measured requests per mode.
        warmup: requests before them.
        rooms: requests of the throughput measurement; 0 leaves it out.
        window: requests in flight in it.
        idle_s: how long idle nodes are watched; 0 leaves it out.
        peers: numbers of connected peers, ascending, at which memory is read; () leaves it out.
        digest: value of the setting `digest`.
    """

    engine: str = "local"
    mechanism: str | None = None
    request_bytes: int = 65536
    modes: tuple[str, ...] = tuple(HABITS)
    samples: int = 300
    warmup: int = 30
    rooms: int = 2000
    window: int = 64
    idle_s: float = 5.0
    peers: tuple[int, ...] = (1, 100, 1000)
    digest: str = "sample"


def check(spec: RoomsSpec) -> None:
    """Refuse what can't be measured, before a process is started.

    Raises:
        ConfigError: what is wrong, with the option's name, and what is possible.
        EngineUnavailable: the engine can't be used here.
    """
    at_least("request-bytes", spec.request_bytes, 1)
    at_least("samples", spec.samples, 1)
    at_least("rooms", spec.rooms, 0)
    at_least("window", spec.window, 1)
    chosen(*(("modes", mode, tuple(HABITS)) for mode in spec.modes))
    chosen(("digest", spec.digest, DIGESTS))
    if spec.request_bytes % ROW_BYTES:
        raise InputError(f"--request-bytes {spec.request_bytes} is not a multiple of {ROW_BYTES}")
    if not 0 <= spec.idle_s <= 600:
        raise InputError(f"--idle-s {spec.idle_s:g} is not within 0 and 600 seconds")
    if list(spec.peers) != sorted(set(spec.peers)) or min(spec.peers, default=1) < 1:
        raise InputError(f"--peers {','.join(map(str, spec.peers))} are not ascending numbers from 1 on")
    check_memory(2 * (spec.window + 1) * spec.request_bytes, "--window or --request-bytes")
    check_files(max(spec.peers, default=0))
    check_engine(spec.engine, spec.mechanism)
    settings_of(spec.mechanism, spec.digest)


def open_files_limit() -> int:
    """How many descriptors a process may have at most; worker processes raise their own limit to it."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def crowd_size() -> int:
    """How many nodes are put into one process: each has five threads and its share of one Python."""
    return max(1, min(125, (open_files_limit() - FILES_BESIDES) // CROWD_FILES))


def check_files(peers: int) -> None:
    """Refuse more peers than a node can have connections to here. Raises InputError."""
    needed, limit = HUB_FILES * peers + FILES_BESIDES, open_files_limit()
    if peers and needed > limit:
        raise InputError(
            f"--peers {peers} need about {needed} open files in one process, its limit is {limit}",
            hint=f"raise it (ulimit -Hn), or measure at most {max(0, (limit - FILES_BESIDES) // HUB_FILES)} peers",
        )
