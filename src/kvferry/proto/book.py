"""The book: all room state of one process. Events and time in, effects out; no I/O, no clock, no thread.

Its maps: offers, claims, room -> live offer (and claim), links by (peer, claim), parked links and tombstones by room.
How links come into them is the subject of `joining`, how all of it goes that of `forgetting`. Nothing here has a timer
of its own: everything that expires is looked at by `on_tick(now)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from kvferry.errors import Code, Reason, RoomInUse
from kvferry.ids import PeerId
from kvferry.proto import joining, rules
from kvferry.proto.claim import Claim, SourceView
from kvferry.proto.effects import (
    Changed,
    Chunk,
    ClaimFacts,
    Effect,
    Fence,
    Kind,
    OfferFacts,
    RouteSize,
    Send,
    Source,
    Times,
    Where,
)
from kvferry.proto.forgetting import forget_claim, forget_links, forget_offer, forget_peer
from kvferry.proto.offer import Link, Offer
from kvferry.proto.peer import Peer
from kvferry.proto.rules import (
    CLAIM,
    OFFER,
    PEER,
    ClaimEvent,
    OfferEvent,
    OfferState,
    PeerEvent,
    PeerState,
    fire,
)
from kvferry.wire import Canary, Tick, TransferInfo, TransferStatus

ROOM_MESSAGES = (TransferInfo, TransferStatus, Tick)
"""What `receive` takes; a peer can send any kind of message at any time."""


class Tombstone(NamedTuple):
    """Why a room failed, for claims of it that come later."""

    reason: Reason
    tag: int
    peers: frozenset[PeerId]
    expires_at: float


class Book:
    """All rooms of one process.

    Every method takes `now` (seconds, monotonic) and may add effects; `take_effects` hands them over, in order.

    Attributes:
        looks_for: says of a claim, by its number, what its sources are waited for; "" where that is not known.
    """

    def __init__(self, times: Times, where: Where) -> None:
        self.times = times
        self.where = where
        self.now = 0.0
        self.offers: dict[int, Offer] = {}
        self.claims: dict[int, Claim] = {}
        self.offer_of: dict[int, int] = {}
        self.claim_of: dict[int, int] = {}
        self.links: dict[tuple[PeerId, int], Link] = {}
        self.parked: dict[int, list[Link]] = {}
        self.tombstones: dict[int, Tombstone] = {}
        self.peers: dict[PeerId, Peer] = {}
        self.jobs: dict[int, Link] = {}
        self.stale: list[Link | SourceView] = []
        self._touched: dict[Offer | Claim, Kind] = {}
        self.counts: Counter[str] = Counter()
        self.refused_peer = ""
        self.looks_for: Callable[[int], str] = lambda _: ""
        self.effects: list[Effect] = []
        self.emit = self.effects.append
        self._next = {"offer": 1, "claim": 1, "job": 1}
        self._closing: Reason | None = None

    # -- schedulers: the sender's room

    def offer(self, now: float, room: int) -> int:
        """Open an offer; returns its number. Raises RoomInUse."""
        self.now = now
        self._refuse_twice(room, self.offer_of, "sender")
        offer = Offer(self, self._number("offer"), room)
        self.offers[offer.id] = offer
        self.offer_of[room] = offer.id
        for link in list(self.parked.get(room, [])):
            joining.join(self, offer, link)
        if self._closing:
            offer.failing(self._closing)
        return self._done(offer)

    def init_offer(self, now: float, number: int, facts: OfferFacts) -> None:
        """Say how much the offer will send."""
        self._offer_event(now, number, OfferEvent.INIT, facts)

    def send(self, now: float, number: int, chunk: Chunk, *, ready: bool = True, aux: bytes = b"") -> None:
        """Hand over one chunk; `aux` travels with the last one."""
        self._offer_event(now, number, OfferEvent.SEND, chunk, ready, aux)

    def chunk_ready(self, now: float, number: int, chunk: int) -> None:
        """The chunk's data is there (its `after` event has happened)."""
        self.now = now
        offer = self.offers.get(number)
        if offer is not None:
            offer.not_ready.discard(chunk)
            offer.pump()
            offer.consider()
            self._done(offer)

    # -- schedulers: the receiver's room

    def claim(self, now: float, room: int, *, tag: int = 0, trace: str = "") -> int:
        """Open a claim; returns its number. Raises RoomInUse."""
        self.now = now
        self._refuse_twice(room, self.claim_of, "receiver")
        claim = Claim(self, self._number("claim"), room, tag, trace)
        self.claims[claim.id] = claim
        self.claim_of[room] = claim.id
        if self._closing:
            claim.failing(self._closing)
        return self._done(claim)

    def resolved(self, now: float, number: int, sources: list[Source]) -> None:
        """The claim's sources are known, and READY."""
        self.now = now
        claim = self.claims.get(number)
        if claim is None or not claim.looking:
            return
        claim.looking = False
        lost = [source.peer for source in sources if not self._ready(source.peer)]
        if lost:
            cause = f"the connection to {lost[0]} was lost before the room began"
            claim.failing(self.where.reason(Code.PEER_LOST, cause, peer=self.named(lost[0]), stage="handshake"))
        else:
            claim.resolved(sources)
            for source in sources:
                self.peers[source.peer].expect_memory()
        self._done(claim)

    def unresolved(self, now: float, number: int, reason: Reason) -> None:
        """The claim's sources can't be found or reached, or don't fit."""
        claim = self.claims.get(number)
        if claim is not None:
            claim.looking = False
            self.fail(now, Kind.CLAIM, number, reason)

    def metadata(self, now: float, number: int, facts: ClaimFacts) -> None:
        """The claim's pages are known."""
        self.now = now
        claim = self.claims.get(number)
        if claim is None:
            return
        self.late(fire(CLAIM, claim, ClaimEvent.METADATA, facts))
        self._done(claim)

    # -- schedulers: either room

    def fail(self, now: float, kind: Kind, number: int, reason: Reason) -> None:
        """End a room from this side: an abort, or what the shell found out."""
        self.now = now
        thing = self.room(kind, number)
        if thing is not None:
            thing.failing(reason)
            self._done(thing)

    def clear(self, now: float, kind: Kind, number: int) -> None:
        """The caller's object is gone; the room number may be used again."""
        self.now = now
        thing = self.room(kind, number)
        if thing is None or thing.cleared:
            return
        thing.cleared = True
        rooms = self.offer_of if kind is Kind.OFFER else self.claim_of
        if rooms.get(thing.room) == number:
            del rooms[thing.room]
        if thing.state not in rules.SETTLED:
            thing.failing(self.where.reason(Code.ABORTED, self._cleared_cause(thing), stage="clear"))
        self._done(thing)

    def operator_release(self, now: float, kind: Kind, number: int) -> None:
        """An operator vouches that nothing of this failed room can land any more; others stay as they are."""
        self.now = now
        thing = self.room(kind, number)
        if thing is None or thing.state not in rules.DRAINS:
            return
        if isinstance(thing, Offer):
            for link in thing.links:
                for job in list(link.jobs):
                    self._end(thing, link, job)
        else:
            for view in thing.views.values():
                view.quiet_seen = True
        thing.consider()
        self._done(thing)

    def shutdown(self, now: float, reason: Reason) -> None:
        """Fail every live room and refuse new ones."""
        self.now, self._closing = now, reason
        for thing in self._live():
            thing.failing(reason)
        self._flush()

    # -- peers

    def peer_ready(self, now: float, peer: PeerId, size: RouteSize, name: str = "", digest: str = "") -> None:
        """Both sides have registered. Lower epochs of the same process are lost by that."""
        self.now = now
        for other in list(self.peers.values()):
            if other.id.incarnation == peer.incarnation and other.id.epoch < peer.epoch:
                cause = f"{peer} replaced {other.id}"
                self.peer_lost(now, other.id, self.where.reason(Code.PEER_LOST, cause, peer=self.named(other.id)))
        record = self.peers.setdefault(peer, Peer(peer, size, name, digest))
        if record.state is PeerState.SHAKING:
            fire(PEER, record, PeerEvent.REGISTERED)
        self._flush()

    def peer_lost(self, now: float, peer: PeerId, reason: Reason) -> None:
        """The connection is gone. Suspicion: the rooms fail, nothing is released by it."""
        self.now = now
        record = self.peers.get(peer)
        if record is None or not fire(PEER, record, PeerEvent.LOSE):
            return
        for link in [link for link in self.links.values() if link.peer == peer]:
            if link.offer is None:
                joining.unpark(self, link)
            else:
                link.claim_success = bool(link.claim_success)
                if link.offer.state in rules.LIVE_OFFERS and not link.over:
                    link.offer.failing(reason)
                self.changed(Kind.OFFER, link.offer)
        views = [self.claims[number].views[peer] for number in sorted(record.claims)]
        for view in views:
            if not view.delivered:  # who has delivered owes nothing: others may still be sending
                view.claim.failing(reason)
        if any(not view.quiet for view in views) and not record.fenced:
            record.fenced = True
            self.emit(Fence(peer, None))
        self._flush()

    def peer_gone(self, now: float, peer: PeerId) -> None:
        """It is proven that nothing of a lost peer can land any more."""
        self.now = now
        record = self.peers.get(peer)
        if record is None or not fire(PEER, record, PeerEvent.PROVE_GONE):
            return
        for number in sorted(record.claims):
            self.claims[number].consider()
        self._flush()

    def fence_done(self, now: float, peer: PeerId, number: int | None) -> None:
        """The proof that a Fence asked for."""
        if number is None:
            self.peer_gone(now, peer)
            return
        self.now = now
        claim = self.claims.get(number)
        if claim is not None and peer in claim.views:
            claim.views[peer].quiet_seen = True
            claim.consider()
            self._done(claim)

    # -- messages

    def receive(self, now: float, peer: PeerId, message: TransferInfo | TransferStatus | Tick) -> None:
        """A room message of a peer."""
        self.now = now
        record = self.peers.get(peer)
        if record is None or not record.may_speak or not isinstance(message, ROOM_MESSAGES):
            self.counts["foreign"] += 1
        elif isinstance(message, TransferInfo):
            joining.hear(self, record, message)
        elif isinstance(message, TransferStatus):
            self._on_status(record, message)
        else:
            self._on_tick(record, message)
        self._flush()

    def _on_status(self, record: Peer, status: TransferStatus) -> None:
        claim = self.claims.get(status.claim)
        view = claim.views.get(record.id) if claim else None
        if claim is None or view is None:
            self.counts["late"] += 1
            return
        if not view.talk.hear(status.rev, status.ack, status.want_ack):
            return
        self.late(fire(CLAIM, claim, ClaimEvent.STATUS, view, status))
        claim.consider()
        forget_claim(self, claim)

    def _on_tick(self, record: Peer, tick: Tick) -> None:
        if not record.hear(tick):
            return
        for other in list(self.peers.values()):
            earlier = other.id.incarnation == record.id.incarnation and other.id.epoch < tick.quiet_below
            if earlier and other.state is PeerState.LOST:
                self.peer_gone(self.now, other.id)
        forget_links(self, record)

    # -- the engine

    def job_progress(self, now: float, job: int) -> None:
        """Some bytes of the job have landed."""
        self.now = now
        if job in self.jobs:
            self.jobs[job].moved_at = now

    def job_landed(self, now: float, job: int, nbytes: int) -> None:
        """All of the job has landed."""
        self._job(now, job, nbytes, landed=True)

    def job_digested(self, now: float, job: int, canary: Canary) -> None:
        """A digest has been taken."""
        link = self.jobs.get(job)
        if link is not None:
            link.canary = canary
        self._job(now, job, 0, landed=False)

    def verified(self, now: float, number: int, peer: PeerId, cause: str) -> None:
        """What landed from a source was compared with what it sent; `cause` says what differs, "" that nothing does."""
        self.now = now
        claim = self.claims.get(number)
        if claim is not None and peer in claim.views:
            self.late(fire(CLAIM, claim, ClaimEvent.VERIFIED, claim.views[peer], cause))
            claim.consider()
            self._done(claim)

    def job_quiet(self, now: float, job: int) -> None:
        """The job ended earlier without a proof; now nothing of it can land any more."""
        self._job(now, job, 0, landed=False)

    def job_failed(self, now: float, job: int, cause: str, *, quiet: bool) -> None:
        """The job failed; `quiet`: nothing of it can land any more."""
        self.now = now
        link = self.jobs.get(job)
        if link is None or link.offer is None:
            return
        if link.offer.state in rules.LIVE_OFFERS:
            reason = self.where.reason(Code.WRITE_FAILED, cause, peer=self.named(link.peer), stage="transfer")
            link.offer.failing(reason)
        if quiet:
            self._job(now, job, 0, landed=False)
        self._flush()

    def _job(self, now: float, job: int, nbytes: int, *, landed: bool) -> None:
        self.now = now
        link = self.jobs.get(job)
        if link is None or link.offer is None:
            return
        offer = link.offer
        self._end(offer, link, job, nbytes, landed)
        offer.consider()
        self._done(offer)

    def _end(self, offer: Offer, link: Link, job: int, nbytes: int = 0, landed: bool = False) -> None:
        self.late(fire(OFFER, offer, OfferEvent.LAND, link, job, nbytes, landed))

    # -- time

    def on_tick(self, now: float) -> None:
        """Repeat what is not acknowledged, look at deadlines, forget what is over."""
        self.now = now
        for thing in self._things():
            if thing.state not in rules.SETTLED:
                thing.deadlines(now)
                thing.consider()
        ends: list[Link | SourceView] = [*self.links.values(), *self._views()]
        for end in ends:
            if end.talk.due(now) and end.talk.rev:
                self._say(end)
        self.tombstones = {room: tomb for room, tomb in self.tombstones.items() if now < tomb.expires_at}
        for peer in list(self.peers.values()):
            tick = peer.tick(self, now)
            if tick is not None:
                self.emit(Send(peer.id, tick))
            forget_links(self, peer)
            forget_peer(self, peer)
        for claim in list(self.claims.values()):
            forget_claim(self, claim)
        for offer in list(self.offers.values()):
            forget_offer(self, offer)
        self._flush()

    def take_effects(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects = self.effects[:]
        self.effects.clear()
        return effects

    @property
    def next_claim(self) -> int:
        """The number that the next claim will have."""
        return self._next["claim"]

    @property
    def idle(self) -> bool:
        """Nothing is remembered but peers that are READY."""
        return not (self.offers or self.claims or self.links or self.jobs)

    # -- for offers and claims

    def named(self, peer: PeerId) -> str:
        """What texts call a peer."""
        record = self.peers.get(peer)
        return record.name if record else str(peer)

    def new_job(self, link: Link) -> int:
        """Number a job of a link."""
        job = self._number("job")
        self.jobs[job] = link
        return job

    def end_job(self, job: int) -> None:
        """The job is over."""
        del self.jobs[job]

    def changed(self, kind: Kind, room: Offer | Claim) -> None:
        """The room may look different now; said once for what happens at once."""
        self._touched[room] = kind

    def show(self) -> None:
        """Say how rooms look that may look different now."""
        if not self._touched:
            return
        touched, self._touched = self._touched, {}
        for room, kind in touched.items():
            ends = room.claims_success if isinstance(room, Offer) else None
            self.emit(Changed(kind, room.id, room.poll, room.bytes_landed, room.reason, ends))

    def bury(self, offer: Offer) -> None:
        """Remember why a room failed, for claims of it that are still to come."""
        assert offer.reason is not None
        if not offer.links or len(offer.links) < offer.fan_in:
            peers = frozenset(link.peer for link in offer.links)
            expires_at = self.now + self.times.claim_timeout_s
            self.tombstones[offer.room] = Tombstone(offer.reason, offer.tag, peers, expires_at)

    # -- helpers

    def _offer_event(self, now: float, number: int, event: OfferEvent, *args: Any) -> None:
        self.now = now
        offer = self.offers.get(number)
        if offer is not None:
            self.late(fire(OFFER, offer, event, *args))
            offer.consider()
            self._done(offer)

    def _refuse_twice(self, room: int, rooms: dict[int, int], what: str) -> None:
        if room in rooms:
            raise RoomInUse(
                f"room {room} has a {what} on this rank already ({self.where.side} {self.where.rank})",
                hint=f"clear() the earlier {what} first, or use another room number",
            )

    def _cleared_cause(self, thing: Offer | Claim) -> str:
        if isinstance(thing, Offer) and thing.facts is not None and thing.state is not OfferState.DRAINING:
            sent = sum(len(chunk.pages.get("kv", b"")) // 4 for chunk in thing.chunks)
            return f"the sender was cleared before it was done: {sent} of {thing.facts.num_pages} pages sent"
        return "cleared before it was done"

    def room(self, kind: Kind, number: int) -> Offer | Claim | None:
        """The offer or claim of that number, while the book keeps it."""
        return self.offers.get(number) if kind is Kind.OFFER else self.claims.get(number)

    def _things(self) -> list[Offer | Claim]:
        return [*self.offers.values(), *self.claims.values()]

    def _live(self) -> list[Offer | Claim]:
        live = rules.LIVE_OFFERS | rules.LIVE_CLAIMS
        return [thing for thing in self._things() if thing.state in live]

    def _views(self) -> list[SourceView]:
        return [view for claim in self.claims.values() for view in claim.views.values()]

    def _ready(self, peer: PeerId) -> bool:
        record = self.peers.get(peer)
        return record is not None and record.state is PeerState.READY

    def late(self, taken: bool) -> None:
        """Count an event that came too late to be taken."""
        if not taken:
            self.counts["late"] += 1

    def _number(self, what: str) -> int:
        self._next[what] += 1
        return self._next[what] - 1

    def _done(self, thing: Offer | Claim) -> int:
        kind = Kind.OFFER if isinstance(thing, Offer) else Kind.CLAIM
        self.changed(kind, thing)
        self._flush()
        return thing.id

    def _flush(self) -> None:
        self.show()  # nobody hears of a room from its peer before its own scheduler can see it
        if self.stale:
            stale, self.stale = self.stale, []
            for end in stale:
                if end.talk.changed:
                    self._say(end)

    def _say(self, end: Link | SourceView) -> None:
        end.talk.sent(self.now, self.times.tick_s)
        if self._ready(end.peer):
            self.emit(Send(end.peer, end.message()))
