"""One process of a simulated world: a real room book, a tiny page pool and a scripted scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.errors import Code, RoomInUse
from kvferry.ids import KVPoll, PeerId
from kvferry.proto import rules
from kvferry.proto.book import Book
from kvferry.proto.effects import Changed, Chunk, ClaimFacts, Digest, Kind, OfferFacts, Release, Source, Verify, Where
from kvferry.wire import Canary, Tick, TransferInfo, TransferStatus, pack_pages, unpack_pages

if TYPE_CHECKING:
    from kvferry.testing.world import Job, World

PAGE_TOKENS = 4
PAGES = {"prefill": 256, "decode": 12}
"""Decode runs short all the time. Prefill does not: two schedulers that wait for each other's memory are no fault of
the protocol, and hold_limit_s is what a deployment breaks such a circle with."""
TERMINAL = frozenset({KVPoll.Success, KVPoll.Failed})
Message = TransferInfo | TransferStatus | Tick


@dataclass(frozen=True)
class Room:
    """One request of the script."""

    uid: int
    number: int
    pages: int
    prefix_pages: int
    knows_tokens: bool
    shape: str
    chunks: int

    @property
    def tag(self) -> int:
        """What both schedulers know of the request."""
        return 7_000_000 + self.uid


class TokenSize:
    """A route that moves one byte per token."""

    def request_bytes(
        self, prefix_tokens: int, num_tokens: int, rows: dict[str, int] | None = None,
        sends: dict[str, tuple[str, ...]] | None = None,
    ) -> int:  # fmt: skip
        """Bytes of a request."""
        del rows
        return 0 if sends == {} else max(0, num_tokens - prefix_tokens)


@dataclass
class Held:
    """What the scheduler keeps of one of its rooms."""

    room: Room
    kind: Kind
    number: int
    pages: list[int] = field(default_factory=list)
    terminal: KVPoll | None = None
    released: bool = False
    cleared: bool = False


class Process:
    """A process that can be killed and revived."""

    def __init__(self, world: World, side: str, rank: int) -> None:
        self.world = world
        self.side = side
        self.rank = rank
        self.name = f"{side} {rank}"
        self.alive = False
        self.incarnation = 0
        self.revive()

    def revive(self) -> None:
        """Start anew: a new incarnation, an empty book, free memory."""
        if self.alive:
            return
        self.alive = True
        self.incarnation = self.world.random.getrandbits(60)
        where = Where(self.side, str(self.rank))
        from kvferry.testing.world import TIMES

        self.book = Book(TIMES, where)
        self.links: dict[Process, PeerId] = {}
        self.dialing: set[Process] = set()
        self.jobs: dict[int, Job] = {}
        self.granted: set[tuple[PeerId, int]] = set()
        self.held: dict[tuple[Kind, int], Held] = {}
        self.owner: list[Any] = [None] * PAGES[self.side]
        self.content: list[Any] = [None] * PAGES[self.side]
        self.cells: dict[tuple[int, int], Any] = {}

    def die(self) -> None:
        """Kill -9."""
        self.alive = False
        self.links.clear()

    # -- driving the book

    def act(self, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Call the book and perform what it asks for."""
        result = call(self.world.now, *args, **more)
        for effect in self.book.take_effects():
            if isinstance(effect, Changed):
                self._changed(effect)
            elif isinstance(effect, Release):
                self._release(effect)
            else:
                self.world.perform(self, effect)
        return result

    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Call an action later, unless this incarnation is dead by then."""
        incarnation = self.incarnation

        def guarded() -> None:
            if self.alive and self.incarnation == incarnation:
                action(*args)

        self.world.at(delay, guarded)

    def tick(self) -> None:
        """The node's timer."""
        if self.alive:
            self.act(self.book.on_tick)
            waiting = any(claim.state in rules.DRAINS for claim in self.book.claims.values())
            if waiting and self.side == "decode":
                for prefill in self.world.prefill:
                    self.world.dial(self, prefill)
        self.world.at(0.25, self.tick)

    def process_of(self, peer: PeerId) -> Process | None:
        """The process behind an identity, while the connection stands."""
        return next((other for other, known in self.links.items() if known == peer), None)

    def connected(self, other: Process, epoch: int) -> None:
        """The handshake over a new connection has succeeded."""
        peer = PeerId(other.incarnation, epoch)
        self.links[other] = peer
        self.act(self.book.peer_ready, peer, TokenSize(), digest=self.world.digest)

    def lost(self, incarnation: int, peer: PeerId) -> None:
        """The connection is noticed to be gone."""
        if not self.alive or self.incarnation != incarnation:
            return
        for other, known in list(self.links.items()):
            if known == peer:
                del self.links[other]
        self.act(self.book.peer_lost, peer, self.world.lost_reason(self, peer))

    def hear(self, incarnation: int, sender: PeerId, message: Message) -> None:
        """A message arrives."""
        if self.alive and self.incarnation == incarnation:
            self.act(self.book.receive, sender, message)

    def job_landed(self, incarnation: int, job: int, nbytes: int) -> None:
        """The engine says that a job has landed."""
        if self.alive and self.incarnation == incarnation:
            self.act(self.book.job_landed, job, nbytes)

    def job_failed(self, incarnation: int, job: int, cause: str, quiet: bool) -> None:
        """The engine says that a job has failed."""
        if self.alive and self.incarnation == incarnation:
            self.act(self.book.job_failed, job, cause, quiet=quiet)

    def job_quiet(self, incarnation: int, job: int) -> None:
        """The engine says that a failed job can't land any more."""
        if self.alive and self.incarnation == incarnation:
            self.act(self.book.job_quiet, job)

    def digested(self, incarnation: int, effect: Digest) -> None:
        """The canary of a link has been taken: of the pages as they are now."""
        if not self.alive or self.incarnation != incarnation:
            return
        pages = [page for chunk in effect.chunks for page in unpack_pages(chunk.pages["kv"]).tolist()]
        seen = [self.content[page] for page in pages[effect.info.prefix_tokens // PAGE_TOKENS :]]
        if None in seen:
            self.world.violate(f"2: {self.name} digests pages {pages} after they were released")
        self.act(self.book.job_digested, effect.job, Canary({"kv": (repr(seen).encode(), b"")}))

    def verified(self, incarnation: int, effect: Verify) -> None:
        """What landed was compared: the pages as they are now."""
        if not self.alive or self.incarnation != incarnation:
            return
        source = next((other for other, known in self.links.items() if known == effect.peer), None)
        pages = unpack_pages(effect.facts.pages["kv"]).tolist()
        if source is not None:
            seen = repr([self.cells[page, source.rank] for page in pages]).encode()
            if seen != effect.canary.sums["kv"][0]:
                self.world.violate(f"3: {self.name} compares {seen!r} with {effect.canary.sums['kv'][0]!r}")
        self.act(self.book.verified, effect.claim, effect.peer, "")

    # -- the scheduler

    def begin(self, room: Room) -> None:
        """A request arrives at this rank, a little later than at others."""
        if self.alive:
            step = self._offer if self.side == "prefill" else self._claim
            self.later(self.world.random.uniform(0, 0.8), step, room, 0)

    def _open(self, room: Room, kind: Kind, attempt: int, retry: Callable[..., None]) -> Held | None:
        """Open the room, or try again while an earlier one of that number is not cleared."""
        open_room = self.book.offer if kind is Kind.OFFER else self.book.claim
        more = {} if kind is Kind.OFFER else {"tag": room.tag}
        try:
            number = self.act(open_room, room.number, **more)
        except RoomInUse:
            if attempt < 20:
                self.later(0.5, retry, room, attempt + 1)
            return None
        held = self.held[kind, number] = Held(room, kind, number)
        if self.world.chance(self.world.faults.abort):
            self.later(self.world.random.expovariate(1.0), self._abort, held)
        return held

    def _offer(self, room: Room, attempt: int) -> None:
        held = self._open(room, Kind.OFFER, attempt, self._offer)
        if held is not None:
            self.later(self.world.random.uniform(0, 0.3), self._compute, held)

    def _compute(self, held: Held) -> None:
        room = held.room
        if held.terminal is not None or not self._allocate(held, room.pages, self._compute):
            return
        for index, page in enumerate(held.pages):
            self.content[page] = (room.uid, index, self.rank)
        tokens = room.pages * PAGE_TOKENS
        facts = OfferFacts(room.pages, PAGE_TOKENS, 0, tokens if room.uid % 2 else None, room.tag)
        self.act(self.book.init_offer, held.number, facts)
        cuts = sorted(self.world.random.sample(range(1, room.pages), room.chunks - 1))
        bounds = list(zip([0, *cuts], [*cuts, room.pages], strict=True))
        delay = 0.0
        for number, (low, high) in enumerate(bounds):
            delay += self.world.random.uniform(0.01, 0.4)
            self.later(delay, self._send, held, number, low, high)

    def _send(self, held: Held, number: int, low: int, high: int) -> None:
        if held.terminal is not None:
            return
        pages = pack_pages(np.array(held.pages[low:high], np.int32))
        chunk = Chunk(number, low, {"kv": pages}, high == held.room.pages)
        ready = self.world.random.random() < 0.8
        self.act(self.book.send, held.number, chunk, ready=ready, aux=f"aux {held.room.uid}".encode())
        if not ready:
            self.later(0.3, self._ready, held, number)

    def _ready(self, held: Held, number: int) -> None:
        self.act(self.book.chunk_ready, held.number, number)

    def _claim(self, room: Room, attempt: int) -> None:
        held = self._open(room, Kind.CLAIM, attempt, self._claim)
        if held is not None:
            self._resolve(held)
            self.later(self.world.random.uniform(0, 1.0), self._place, held)

    def _sources(self, room: Room) -> list[Process]:
        return [self.world.prefill[self.rank]] if room.shape == "one to one" else self.world.prefill

    def _resolve(self, held: Held) -> None:
        if held.number not in self.book.claims:
            return
        sources = self._sources(held.room)
        for prefill in sources:
            self.world.dial(self, prefill)
        if not all(prefill in self.links for prefill in sources):
            self.later(0.2, self._resolve, held)
            return
        fan_in = 1 if held.room.shape == "one to one" else 2
        elected = self._elected(held.room)
        self.act(
            self.book.resolved, held.number,
            [Source(self.links[each], fan_in, None if each.rank in elected else {}, TokenSize()) for each in sources],
        )  # fmt: skip

    def _elected(self, room: Room) -> set[int]:
        if room.shape == "replicas":
            return {room.uid % 2}
        return {self.rank} if room.shape == "one to one" else {0, 1}

    def _place(self, held: Held) -> None:
        room = held.room
        wanted = room.pages - room.prefix_pages
        if held.terminal is not None or not self._allocate(held, wanted, self._place):
            return
        for page in held.pages:
            for rank in range(2):
                self.cells[page, rank] = "fresh"
        tokens = room.pages * PAGE_TOKENS if room.knows_tokens else None
        facts = ClaimFacts(
            {"kv": pack_pages(np.array(held.pages, np.int32))}, PAGE_TOKENS, wanted,
            room.prefix_pages * PAGE_TOKENS, tokens, {}, room.tag,
        )  # fmt: skip
        self.act(self.book.metadata, held.number, facts)

    def _allocate(self, held: Held, count: int, retry: Callable[..., None]) -> bool:
        free = [page for page in range(len(self.owner)) if self.owner[page] is None]
        if len(free) < count:
            self.later(0.1, retry, held)
            return False
        # the page freed last is taken first, as real allocators do: the worst case for late writes
        held.pages = free[-count:] if count else []
        for page in held.pages:
            self.owner[page] = (held.kind.value, held.number)
        return True

    def _abort(self, held: Held) -> None:
        if held.terminal is None:
            reason = self.book.where.reason(Code.ABORTED, "the client went away")
            self.act(self.book.fail, held.kind, held.number, reason)

    # -- what the book says

    def _changed(self, effect: Changed) -> None:
        held = self.held.get((effect.kind, effect.id))
        if held is None:
            return
        poll = effect.poll
        if held.terminal is not None and poll != held.terminal:
            self.world.violate(f"4: {self.name} {held.kind.value} went from {held.terminal.name} to {poll.name}")
        if held.terminal is None and poll in TERMINAL:
            held.terminal = poll
            self.world.finished[f"{held.kind.value} {poll.name}"] += 1
            if poll is KVPoll.Success and held.kind is Kind.CLAIM:
                self._check_bytes(held)
                self.later(0.2, self._free, held)
            self.later(self.world.random.uniform(0.0, 0.5), self._clear, held)
            if not held.pages:
                self._free(held)

    def _check_bytes(self, held: Held) -> None:
        room = held.room
        for index, page in enumerate(held.pages):
            for rank in self._elected(room):
                found, right = self.cells[page, rank], (room.uid, index + room.prefix_pages, rank)
                if found != right:
                    self.world.violate(f"3: {self.name} got {found} instead of {right} at Success")

    def _release(self, effect: Release) -> None:
        held = self.held.get((effect.kind, effect.id))
        if held is not None:
            if held.released:
                self.world.violate(f"4: {self.name} {held.kind.value} {held.number} released twice")
            held.released = True
            self._free(held)

    def _free(self, held: Held) -> None:
        for page in held.pages:
            if self.owner[page] == (held.kind.value, held.number):
                self.owner[page] = None
                self.content[page] = None
        held.pages = []

    def _clear(self, held: Held) -> None:
        held.cleared = True
        self.act(self.book.clear, held.kind, held.number)

    # -- the end

    def check_settled(self) -> None:
        """Nothing is left of any room."""
        for held in self.held.values():
            if held.terminal is None:
                self.world.violate(f"5: {self.name} {held.kind.value} of room {held.room} never ended")
        owned = [owner for owner in self.owner if owner is not None]
        if owned:
            self.world.violate(f"5: {self.name} still has pages of {owned}")
        if not self.book.idle:
            left = f"{len(self.book.offers)} offers, {len(self.book.claims)} claims, {len(self.book.links)} links"
            self.world.violate(f"5: the book of {self.name} still holds {left}, {len(self.book.jobs)} jobs")
