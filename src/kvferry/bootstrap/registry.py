"""The registry itself: which prefill ranks live, and which DP rank has a room. No I/O; time is an argument.

Rules:
1. The first entry fixes the sizes of the grid; another size is refused until all entries are gone.
2. A rank is held by one incarnation at a time. Another one is refused, never swapped in, until the holder
   unregisters or has not renewed for ttl_s. So a restarted rank waits for at most ttl_s.
3. Every expired entry goes, not only those before the first live one.
4. `generation` moves whenever a live entry comes, goes or changes, so a stale topology shows.
5. A room's DP rank is a hint for routing: the newest one wins, for a room number may be used again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvferry.bootstrap.records import (
    DEFAULT_TTL_S,
    MAX_RANKS,
    ConflictError,
    RankEntry,
    RefusedError,
    Topology,
    check_entry,
    check_room,
    grid_ranks,
    rank_count,
)
from kvferry.errors import ConfigError
from kvferry.ids import Incarnation, Rank


class Registry:
    """Live prefill ranks and the rooms' DP ranks. Not thread-safe: one thread calls it.

    Args:
        ttl_s: seconds without a renewal after which an entry is forgotten.
        room_ttl_s: seconds after which a room's DP rank is forgotten.
        max_rooms: the most rooms that are remembered at once.
        instance: which registry this is, said in every topology.
    """

    def __init__(
        self, ttl_s: float = DEFAULT_TTL_S, room_ttl_s: float = 300.0, *, max_rooms: int = 1 << 20, instance: str = ""
    ) -> None:
        for name, value in (("ttl_s", ttl_s), ("room_ttl_s", room_ttl_s), ("max_rooms", max_rooms)):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"bootstrap registry: {name} is {value}", hint="give a positive number")
        self.ttl_s = ttl_s
        self.room_ttl_s = room_ttl_s
        self.max_rooms = max_rooms
        self.instance = instance
        self.generation = 0
        self.sizes: Rank | None = None
        self._entries: dict[Rank, RankEntry] = {}
        self._expires_s: dict[Rank, float] = {}
        self._rooms: dict[int, tuple[int, float]] = {}
        self._sweep_s = -math.inf

    def register(self, entry: RankEntry, now: float) -> str:
        """Add, renew or update an entry.

        Returns:
            "added", "renewed" (nothing is new) or "updated".

        Raises:
            RefusedError: the entry is malformed, its sizes differ from the grid's, or its epoch went back.
            ConflictError: another live incarnation holds the rank.
        """
        self.expire(now)
        check_entry(entry)
        self._check_sizes(entry)
        held = self._entries.get(entry.rank)
        if held is not None:
            self._check_holder(held, entry, now)
        self.sizes = entry.sizes
        self._expires_s[entry.rank] = now + self.ttl_s
        if held == entry:
            return "renewed"
        self._entries[entry.rank] = entry
        self.generation += 1
        return "added" if held is None else "updated"

    def unregister(self, rank: Rank, incarnation: Incarnation, now: float) -> bool:
        """Remove an entry, if this incarnation holds it: a late farewell must not remove the successor.

        Returns:
            Whether an entry was removed.
        """
        self.expire(now)
        held = self._entries.get(rank)
        if held is None or held.incarnation != incarnation:
            return False
        self._drop([rank])
        return True

    def expire(self, now: float) -> int:
        """Forget every entry that was not renewed in time. Every other method does so first.

        Returns:
            How many entries were forgotten.
        """
        expired = [rank for rank, expires_s in self._expires_s.items() if expires_s <= now]
        self._drop(expired)
        return len(expired)

    def ready(self, now: float) -> tuple[bool, tuple[Rank, ...]]:
        """Whether every rank of the grid is registered, and which are missing (none, while sizes is None)."""
        topology = self.topology(None, now)
        return topology.complete, topology.missing

    def counts(self, now: float) -> tuple[int, int]:
        """Registered ranks, and ranks of the grid (0 while its sizes are not known)."""
        self.expire(now)
        return len(self._entries), 0 if self.sizes is None else rank_count(self.sizes)

    def topology(self, dp: int | None, now: float) -> Topology:
        """The grid as it stands; of one DP rank only, unless dp is None.

        Raises:
            RefusedError: dp lies outside of the grid.
        """
        self.expire(now)
        if dp is not None:
            self._check_dp(dp)
        ranks = () if self.sizes is None else tuple(grid_ranks(self.sizes, dp))
        return Topology(
            sizes=self.sizes,
            entries=tuple(self._entries[rank] for rank in ranks if rank in self._entries),
            missing=tuple(rank for rank in ranks if rank not in self._entries),
            generation=self.generation,
            instance=self.instance,
        )

    def put_rooms(self, rooms: Mapping[int, int], now: float) -> None:
        """Remember the DP rank of each room for room_ttl_s: all of them, or none if one is refused.

        Raises:
            RefusedError: a room or DP rank is out of range, or there is no place for the new rooms.
        """
        self.expire(now)
        for room, dp in rooms.items():
            check_room(room)
            self._check_dp(dp)
        self._sweep_rooms(now)
        total = len(self._rooms) + sum(room not in self._rooms for room in rooms)
        if total > self.max_rooms:
            raise RefusedError(
                f"{len(rooms)} rooms would make {total} remembered rooms, more than {self.max_rooms}",
                code="rooms_full",
                hint=f"rooms are forgotten after {self.room_ttl_s} s; wait, or raise max_rooms",
            )
        expires_s = now + self.room_ttl_s
        self._rooms.update({room: (dp, expires_s) for room, dp in rooms.items()})

    def query_rooms(self, rooms: Iterable[int], now: float) -> dict[int, int]:
        """The DP rank of every room that is remembered; other rooms are absent from the answer.

        Raises:
            RefusedError: a room is out of range.
        """
        found: dict[int, int] = {}
        for room in rooms:
            check_room(room)
            dp, expires_s = self._rooms.get(room, (0, -math.inf))
            if now < expires_s:
                found[room] = dp
        return found

    def _drop(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            del self._entries[rank], self._expires_s[rank]
        self.generation += bool(ranks)
        if not self._entries:
            self.sizes = None

    def _sweep_rooms(self, now: float) -> None:
        """Forget old rooms, rarely enough that a put costs little: at most an eighth too many are kept."""
        if now < self._sweep_s:
            return
        self._rooms = {room: kept for room, kept in self._rooms.items() if now < kept[1]}
        self._sweep_s = now + self.room_ttl_s / 8

    def _check_sizes(self, entry: RankEntry) -> None:
        if self.sizes is not None and entry.sizes != self.sizes:
            first = next(iter(self._entries.values()))
            raise RefusedError(
                f"prefill rank {entry.rank} at {entry.endpoint} has sizes {entry.sizes}, but the grid has "
                f"{self.sizes} (rank {first.rank} at {first.endpoint})",
                code="sizes_differ",
                hint=f"start all ranks with the same sizes; old ranks are forgotten after {self.ttl_s} s",
            )

    def _check_holder(self, held: RankEntry, entry: RankEntry, now: float) -> None:
        if held.incarnation != entry.incarnation:
            left_s = self._expires_s[entry.rank] - now
            raise ConflictError(
                f"prefill rank {entry.rank}: incarnation {entry.incarnation:016x} at {entry.endpoint} can't "
                f"have it while incarnation {held.incarnation:016x} at {held.endpoint} holds it",
                hint=f"two ranks are configured alike, or the old one is dead and expires in {left_s:.1f} s",
                expires_s=left_s,
            )
        if entry.epoch < held.epoch:
            raise RefusedError(
                f"prefill rank {entry.rank}: epoch {entry.epoch} is older than the registered {held.epoch}",
                code="stale_epoch",
                hint="a late registration arrived after a newer one; send the current epoch",
            )

    def _check_dp(self, dp: int) -> None:
        limit = MAX_RANKS if self.sizes is None else self.sizes.dp
        if not 0 <= dp < limit:
            raise RefusedError(
                f"DP rank {dp if abs(dp) < 2**64 else 'of over 64 bits'} is not within 0 and {limit - 1}",
                code="outside_grid",
                hint="ask for a DP rank of the prefill side",
            )


class ForeignRoute(NamedTuple):
    """A route that a serving engine's own registry has.

    Attributes:
        path: with the leading slash.
        method: HTTP method.
        answer: called with registry, query, body and time; returns status and what is encoded as JSON.
        needs_token: whether callers need the bearer token.
    """

    path: str
    method: str
    answer: Callable[[Registry, dict[str, str], bytes, float], tuple[int, object]]
    needs_token: bool = True
