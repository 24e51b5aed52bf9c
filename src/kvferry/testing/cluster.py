"""A whole cluster for a test: prefill and decode ranks of any layouts, on any engine, and requests between them.

    prefill = layouts_of(model, parse_grid("tp=2,page=16"), num_pages)
    decode = layouts_of(model, parse_grid("tp=1,page=64,order=hnd"), num_pages)
    with Cluster(prefill, decode, engine="local") as cluster:
        request = cluster.request(num_tokens=130, prefix=37)
        request.wait()
        request.check()     # every byte of every rank, guards included
        request.clear()
        assert cluster.clean() == []

Each rank is a manager over pattern-filled memory; what must land where is said by the oracle, which does not know the
planner. A rank lives in this process, or in one of its own (`processes=True`), which can be stopped and killed.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvferry.layout import Layout
from kvferry.testing.cluster_process import RankProcess
from kvferry.testing.cluster_rank import ClusterRank, HandOff
from kvferry.testing.control_proxy import ControlProxy
from kvferry.testing.settings import PATIENCE
from kvferry.testing.suite_memory import PLAIN

Rank = ClusterRank | RankProcess

WAIT_S = 20.0 * PATIENCE
CLEAR_S = 5.0 * PATIENCE


class Cluster:
    """Both sides.

    Attributes:
        prefill, decode: the ranks.
        proxies: one for each prefill rank's control plane; none without `proxy`.
    """

    def __init__(
        self, prefill: Sequence[Layout], decode: Sequence[Layout], *, engine: str = "local", processes: bool = False,
        proxy: bool = False, memory: str = PLAIN, **settings: Any,
    ) -> None:  # fmt: skip
        """Start all ranks.

        Args:
            prefill: layouts of the prefill ranks, not bound to memory.
            decode: layouts of the decode ranks; those of one DP group know of each other.
            engine: the transfer engine of both sides.
            processes: each rank is a process.
            proxy: decode ranks reach each prefill rank's control plane through a proxy that a test can tell to lose,
                delay and repeat messages, and to cut.
            memory: where the ranks' memory comes from, "module:function" (see `suite_memory`).
            settings: of all managers, by name.

        Raises:
            ConfigError (LayoutError, EngineUnavailable, ...): what a manager says.
        """
        self._before = _resources()
        self._rooms = itertools.count(1)
        self._closed = False
        self.prefill: list[Rank] = []
        self.decode: list[Rank] = []
        self.proxies: list[ControlProxy] = []
        make = RankProcess if processes else ClusterRank
        try:
            for layout in prefill:
                self.prefill.append(make("prefill", layout, (), decode, engine, settings, memory))
            for layout in decode:
                group = [other for other in decode if other.rank.dp == layout.rank.dp]
                self.decode.append(make("decode", layout, group, prefill, engine, settings, memory))
            if proxy:
                self.proxies += [ControlProxy(rank.endpoint) for rank in self.prefill]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ranks(self) -> list[Rank]:
        """All of them, decode first: who waits is told before who sends."""
        return [*self.decode, *self.prefill]

    @property
    def endpoints(self) -> list[str]:
        """Where decode ranks find the prefill ranks' control planes."""
        return [each.endpoint for each in self.proxies or self.prefill]

    def request(
        self, num_tokens: int, *, room: int | None = None, sends: bool = True, groups: tuple[int, int] | None = None,
        more: Sequence[str] = (), **facts: int,
    ) -> Request:  # fmt: skip
        """Begin a request on all ranks.

        Args:
            num_tokens: its tokens.
            room: its room number; None takes the next.
            sends: prefill sends at once; else when `Request.send` is called.
            groups: the DP groups that serve it, of prefill and of decode; None: all ranks.
            more: further addresses that decode ranks are told.
            facts: prefix, first_token, chunk_pages, rows: see HandOff.
        """
        request = HandOff(next(self._rooms) if room is None else room, num_tokens, **facts)
        chosen = (None, None) if groups is None else groups
        prefill, decode = (_of_group(ranks, dp) for ranks, dp in zip((self.prefill, self.decode), chosen, strict=True))
        places = {id(rank): endpoint for rank, endpoint in zip(self.prefill, self.endpoints, strict=True)}
        for rank in prefill:
            rank.begin(request, sends=sends)
        for rank in decode:
            rank.begin(request, [*(places[id(source)] for source in prefill), *more])
        return Request(request, prefill, decode)

    def clean(self, limit_s: float = CLEAR_S) -> list[str]:
        """What is not as it was before, in words; [] if all is.

        While the cluster is open: rooms, grants and pages of all ranks, and their threads' health. After `close`:
        threads and descriptors (sockets among them) that this process has more than before.

        Args:
            limit_s: how long to wait for it: grants go when a peer has heard of it.
        """
        deadline = time.monotonic() + limit_s
        while (found := self._leftovers()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def close(self) -> None:
        """End all ranks and proxies. May be called twice."""
        self._closed = True
        for each in (*self.ranks, *self.proxies):
            each.close()

    def _leftovers(self) -> list[str]:
        if self._closed:
            now = _resources()
            return [f"{now[what] - count:+d} {what}" for what, count in self._before.items() if now[what] > count]
        found = [words for rank in self.ranks if not rank.health() for words in rank.leftovers()]
        return found + [f"{rank.layout.rank}: {words}" for rank in self.ranks if (words := rank.health())]


class Request:
    """One request on the ranks that serve it.

    Attributes:
        facts: what all of them were told.
        prefill, decode: the ranks.
    """

    def __init__(self, facts: HandOff, prefill: list[Rank], decode: list[Rank]) -> None:
        self.facts, self.prefill, self.decode = facts, prefill, decode

    @property
    def room(self) -> int:
        """Its number."""
        return self.facts.room

    @property
    def ranks(self) -> list[Rank]:
        """All ranks, decode first."""
        return [*self.decode, *self.prefill]

    def send(self, chunks: int | None = None) -> None:
        """Have each prefill rank send so many chunks; None: all that are left."""
        for rank in self.prefill:
            rank.send(self.room, chunks)

    def ends(self, timeout_s: float = WAIT_S) -> list[str]:
        """How it has ended on each rank, decode first: "Success", "Failed", or "" where it has not in time."""
        deadline = time.monotonic() + timeout_s
        return [rank.wait(self.room, max(0.0, deadline - time.monotonic())) for rank in self.ranks]

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Wait for Success on all ranks. Raises AssertionError with the reasons, or who has not ended."""
        ends = self.ends(timeout_s)
        if set(ends) != {"Success"}:
            said = [
                f"{end or 'not ended'}: {rank.failure(self.room)}" for end, rank in zip(ends, self.ranks, strict=True)
            ]
            raise AssertionError(f"room {self.room}: " + "; ".join(said))

    def failures(self) -> list[str]:
        """Why it failed on each rank, decode first; "" where it has not."""
        return [rank.failure(self.room) for rank in self.ranks]

    def abort(self, side: str = "decode", reason: str = "aborted by the test") -> None:
        """End it from all ranks of one side."""
        for rank in self.decode if side == "decode" else self.prefill:
            rank.abort(self.room, reason)

    @property
    def landed_bytes(self) -> int:
        """Bytes that came, over all decode ranks."""
        return sum(rank.landed_bytes(self.room) for rank in self.decode)

    @property
    def wanted_bytes(self) -> int:
        """Bytes that the decode ranks' parts of it have."""
        return sum(rank.wanted_bytes(self.room) for rank in self.decode)

    def check(self) -> None:
        """Every byte of every rank is as it must be, and the metadata row is prefill's. Raises AssertionError."""
        for rank in self.ranks:
            assert rank.differences() == "", f"{rank.layout.rank}: {rank.differences()}"
        for rank in self.decode:
            row = rank.aux_row(self.room)
            assert row == [self.room, self.facts.num_tokens], f"{rank.layout.rank}: metadata row {row}"

    def clear(self, limit_s: float = CLEAR_S) -> None:
        """Give its rooms and pages back. Raises AssertionError if pages are still in use after limit_s."""
        deadline = time.monotonic() + limit_s
        for rank in self.ranks:
            while not rank.clear(self.room):
                assert time.monotonic() < deadline, f"{rank.layout.rank}: pages of room {self.room} are not free"
                time.sleep(0.01)


def _of_group(ranks: list[Rank], dp: int | None) -> list[Rank]:
    return [rank for rank in ranks if dp is None or rank.layout.rank.dp == dp]


def _resources() -> dict[str, int]:
    return {"threads": threading.active_count(), "descriptors": len(os.listdir("/proc/self/fd"))}
