"""What a connected peer costs: one node, the hub, connected to 1, 100, 1,000 others that live in a few processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from kvferry.bench.children import Child, Crew
from kvferry.bench.peers_side import Setup
from kvferry.bench.rooms_spec import RoomsSpec, crowd_size

SIDE = "kvferry.bench.peers_side"
BATCH = 25
"""Peers that are connected at once."""
LIMIT_S = 180.0


class PeerCost(msgspec.Struct, frozen=True):
    """Memory of one node as its connected peers grow in number.

    Attributes:
        rss_mb: by number of peers, 10**6 bytes.
        kb_per_peer: growth of the resident memory from the first to the last number, in 1024 bytes per peer; None
            if there was one number only.
        open_files: open descriptors of the node at the last number.
    """

    rss_mb: dict[int, float]
    kb_per_peer: float | None
    open_files: int


def peer_cost(spec: RoomsSpec, side: str, say: Callable[[str], None], command: Sequence[str] = ()) -> PeerCost:
    """Measure a node of one side.

    Args:
        spec: peers, engine and mechanism are read.
        side: "decode": prefill peers are connected to it; "prefill": decode nodes claim from it.
        say: takes a line on how far it is.
        command: what starts a worker process; () is this package's own.

    Raises:
        BenchError: a process died, hung or failed: too few open files or threads are allowed, for instance.
    """
    with Crew(command) as crew:
        run = _Run(crew, spec, side)
        found: dict[int, dict[str, int]] = {}
        for before, count in pairwise((0, *spec.peers)):
            run.connect(before, count)
            found[count] = run.memory()
            say(f"{side} node with {count} connected: {found[count]['rss'] * 1024 / 1e6:.1f} MB")
    first, last = min(found), max(found)
    growth = (found[last]["rss"] - found[first]["rss"]) / (last - first) if last > first else None
    rss_mb = {count: memory["rss"] * 1024 / 1e6 for count, memory in found.items()}
    return PeerCost(rss_mb, growth, found[last]["open_files"])


class _Run:
    """The hub, and the processes of its peers."""

    def __init__(self, crew: Crew, spec: RoomsSpec, side: str) -> None:
        self._crew = crew
        self._spec = spec
        self._side = side
        self._other = "prefill" if side == "decode" else "decode"
        self._crowds: list[Child] = []
        self._crowd_size = crowd_size()
        self._hub = self._start(f"{side} hub", "Hub", side)

    def connect(self, first: int, last: int) -> None:
        """Connect peers first .. last - 1, with one tiny request each."""
        while first < last:
            crowd, place = divmod(first, self._crowd_size)
            if crowd == len(self._crowds):
                self._crowds.append(self._start(f"{self._other} peers {len(self._crowds)}", "Crowd", self._other))
            count = min(BATCH, last - first, self._crowd_size - place)
            self._batch(self._crowds[crowd], first, count)
            first += count

    def memory(self) -> dict[str, int]:
        """Memory of the hub in KB, and its open files."""
        found: dict[str, int] = self._crew.ask(self._hub, "memory", LIMIT_S)
        return found

    def _start(self, name: str, role: str, side: str) -> Child:
        setup = Setup(self._spec.engine, self._spec.mechanism, side, self._spec.digest)
        child = self._crew.start(name, f"{SIDE}:{role}", setup)
        hello = self._crew.ready(child)
        if role == "Hub":
            self._endpoint = hello
        return child

    def _batch(self, crowd: Child, first: int, count: int) -> None:
        endpoints: list[str] = self._ask(crowd, "grow", count=count)
        rooms = list(range(first + 1, first + count + 1))
        if self._side == "decode":
            self._ask(crowd, "offer", rooms=rooms)
            self._ask(self._hub, "claim", rooms=rooms, endpoints=endpoints)
        else:
            self._ask(self._hub, "offer", rooms=rooms)
            self._ask(crowd, "claim", rooms=rooms, endpoints=[self._endpoint] * count)
        self._ask(crowd, "finish")
        self._ask(self._hub, "finish")

    def _ask(self, child: Child, what: str, **arguments: Any) -> Any:
        return self._crew.ask(child, what, LIMIT_S, **arguments)
