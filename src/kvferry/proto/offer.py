"""The sender's room: an offer, and a link for each claim inside it.

The methods named in rules.OFFER are that table's actions. An offer ends when all its links have ended; each link is
sent as soon as its own pages are known, so that two ranks that allocate in opposite order can't wait for each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import Code, Reason
from kvferry.ids import KVPoll, PeerId
from kvferry.proto import match, rules
from kvferry.proto.dialogue import Dialogue
from kvferry.proto.effects import Chunk, Digest, Kind, OfferFacts, Prepare, Release, Stop, Submit
from kvferry.proto.rules import OFFER, OfferEvent, OfferState, fire
from kvferry.wire import Canary, InfoPhase, StatusPhase, TransferInfo, TransferStatus

if TYPE_CHECKING:
    from kvferry.proto.book import Book


class Link:
    """One claim at its source: parked (no offer yet), joined to an offer, or refused for ever."""

    def __init__(self, book: Book, peer: PeerId, info: TransferInfo) -> None:
        self.book = book
        self.peer = peer
        self.info = info
        self.talk = Dialogue()
        self.offer: Offer | None = None
        self.refused = False
        self.phase = StatusPhase.QUEUED
        self.reason: Reason | None = None
        self.posted = 0
        self.chunks_landed = 0
        self.bytes_landed = 0
        self.moved_at = 0.0
        self.told_at = 0.0
        self.jobs: dict[int, Chunk] = {}
        self.prepared = False
        self.digested = False
        self.digest_job = 0
        self.claim_success: bool | None = None
        self.canary: Canary | None = None

    def own_bytes(self, facts: OfferFacts) -> int:
        """What this side computes that the claim is to get over this link."""
        rows = {space: len(data) // 4 for space, data in self.info.pages.items()}
        end = match.end_tokens(facts, self.info)
        return self.book.peers[self.peer].size.request_bytes(self.info.prefix_tokens, end, rows, self.info.sends)

    def refuse(self, reason: Reason) -> None:
        """Say no, and go on saying no to this claim."""
        self.offer = None
        self.phase = StatusPhase.FAILED
        self.reason = reason
        self.refused = True
        self.publish()
        if not rules.REMEMBER_REFUSED:
            del self.book.links[self.peer, self.info.claim]
            self.book.peers[self.peer].links -= 1

    def publish(self) -> None:
        """The status that the claim sees has changed."""
        self.talk.publish()
        self.told_at = self.book.now
        self.book.stale.append(self)

    def tell_progress(self, now: float) -> None:
        """Let the claim know, once per heartbeat, that a chunk which takes long is moving."""
        if self.moved_at > self.told_at and now - self.told_at >= self.book.times.heartbeat_s:
            self.publish()

    def message(self) -> TransferStatus:
        """The snapshot."""
        delivered = self.phase is StatusPhase.DELIVERED
        return TransferStatus(
            room=self.info.room, claim=self.info.claim, offer=self.offer.id if self.offer else 0,
            rev=self.talk.rev, ack=self.talk.seen, want_ack=not self.talk.settled,
            phase=self.phase, chunks_landed=self.chunks_landed, chunks_total=self.posted,
            bytes_landed=self.bytes_landed, quiet=not self.jobs,
            aux=self.offer.aux if self.offer and delivered else b"", canary=self.canary if delivered else None,
            reason=self.reason,
        )  # fmt: skip

    @property
    def over(self) -> bool:
        """Delivered or failed: nothing more is posted."""
        return self.phase in {StatusPhase.DELIVERED, StatusPhase.FAILED}


class Offer:
    """One room at one source rank."""

    def __init__(self, book: Book, offer: int, room: int) -> None:
        self.book = book
        self.id = offer
        self.room = room
        self.state = OfferState.WAITING
        self.facts: OfferFacts | None = None
        self.chunks: list[Chunk] = []
        self.not_ready: set[int] = set()
        self.links: list[Link] = []
        self.aux = b""
        self.reason: Reason | None = None
        self.refusal = ""
        self.opened_at = book.now
        self.failed_at = 0.0
        self.cleared = False
        self.released = False

    # -- what schedulers see

    @property
    def poll(self) -> KVPoll:
        """The state for schedulers."""
        if self.state in rules.FAILED_OFFERS:
            return KVPoll.Failed
        if self.state is OfferState.DELIVERED:
            return KVPoll.Success
        if self.state is OfferState.SENDING:
            return KVPoll.Transferring
        pages = sum(link.info.phase is InfoPhase.PAGES for link in self.links)
        return KVPoll.WaitingForInput if self.links and pages == self.fan_in else KVPoll.Bootstrapping

    @property
    def tag(self) -> int:
        """The request tag; 0 = none or not known yet."""
        return self.facts.tag if self.facts else 0

    @property
    def fan_in(self) -> int:
        """How many claims are expected, as the first claim says; 0 = not known yet."""
        return self.links[0].info.fan_in if self.links else 0

    @property
    def outstanding(self) -> int:
        """Jobs that may still read this side's pages."""
        return sum(len(link.jobs) for link in self.links)

    @property
    def bytes_landed(self) -> int:
        """Bytes landed on all links."""
        return sum(link.bytes_landed for link in self.links)

    @property
    def claims_success(self) -> bool | None:
        """Whether all claims got all they wanted, from other sources too; None while one of them has not ended."""
        ends = [link.claim_success for link in self.links]
        if not ends or len(ends) < self.fan_in or None in ends:
            return None
        return all(ends)

    # -- events

    def consider(self) -> None:
        """Take what follows from the present state: completion of links and of the offer, or its end."""
        if self.state in rules.LIVE_OFFERS:
            for link in self.links:
                self._consider_link(link)
            if (
                self.links
                and len(self.links) == self.fan_in
                and all(link.phase is StatusPhase.DELIVERED for link in self.links)
            ):
                fire(OFFER, self, OfferEvent.COMPLETE)
        elif self.state in rules.DRAINS and not self.outstanding:
            fire(OFFER, self, OfferEvent.DRAINED)
        self.book.changed(Kind.OFFER, self)

    def deadlines(self, now: float) -> None:
        """Look at the clocks that run in this state."""
        times = self.book.times
        if self.state in rules.LIVE_OFFERS:
            # also while SENDING: one claim may be served long before another one fails to come
            missing = not self.links or len(self.links) < self.fan_in
            if missing and now - self.opened_at >= times.claim_timeout_s:
                self._no_claim()
            else:
                self._watch(now)
        elif self.state is OfferState.DRAINING and now - self.failed_at >= times.drain_limit_s:
            fire(OFFER, self, OfferEvent.DRAIN_LIMIT)

    def failing(self, reason: Reason) -> None:
        """Fail, unless it has ended already."""
        if fire(OFFER, self, OfferEvent.FAIL, reason):
            self.consider()
        else:
            self.book.counts["late"] += 1

    # -- actions of rules.OFFER

    def store(self, facts: OfferFacts) -> None:
        """Keep what init() said."""
        self.facts = facts

    def recheck(self, facts: OfferFacts) -> None:
        """Look again at the claims that joined before init() said what they must agree with."""
        del facts
        for link in list(self.links):
            self.check(link)

    def check(self, link: Link) -> bool:
        """Refuse a joined claim that differs from this offer in something known; say whether it stays."""
        cause = match.difference(self, link)
        if not cause:
            return True
        self.links.remove(link)
        cause += "; both sides must mean the same request: its pages, tokens, prefix and tag"
        self.refusal = cause
        reason = self.book.where.reason(
            Code.REFUSED, cause, peer=self.book.named(link.peer), stage="handshake of the room"
        )
        link.refuse(reason)
        if self.tag and self.tag == link.info.tag:
            self.failing(reason)
        return False

    def record(self, chunk: Chunk, ready: bool, aux: bytes) -> None:
        """Keep a chunk; it is posted once it is ready."""
        self.chunks.append(chunk)
        if not ready:
            self.not_ready.add(chunk.number)
        if chunk.last:
            self.aux = aux

    def join(self, link: Link) -> None:
        """Take a claim in, unless something known differs."""
        self.links.append(link)
        link.offer = self
        if self.check(link):
            link.publish()

    def pump(self, *_: object) -> None:
        """Post what can be posted, link by link."""
        for link in self.links:
            self._prepare(link)
            while (chunk := self._next_chunk(link)) is not None and self.state in rules.LIVE_OFFERS:
                fire(OFFER, self, OfferEvent.POST, link, chunk)
            if self._wants_digest(link):
                self._take_digest(link)

    def post(self, link: Link, chunk: Chunk) -> None:
        """Hand a chunk to the mover."""
        assert self.facts is not None
        job = self.book.new_job(link)
        link.jobs[job] = chunk
        link.posted += 1
        link.moved_at = self.book.now
        if link.phase is StatusPhase.QUEUED:
            link.phase = StatusPhase.SENDING
            link.talk.publish()  # said on the next tick, unless more is to be said before: most rooms are over by then
        end = match.end_tokens(self.facts, link.info)
        self.book.emit(Submit(job, link.peer, self.id, chunk, link.info, self.facts.first_token, end))

    def _prepare(self, link: Link) -> None:
        """Have prepared what takes long, or what would have to be done when there is something to send."""
        info, facts = link.info, self.facts
        if link.prepared or facts is None or info.phase is not InfoPhase.PAGES or self.state not in rules.LIVE_OFFERS:
            return
        link.prepared = True
        record = self.book.peers.get(link.peer)
        digest, nbytes = record.digest if record else "", info.expected_bytes or 0
        if nbytes and (not self.chunks or (digest and nbytes > rules.PREPARE_BYTES)):
            end = match.end_tokens(facts, info)
            self.book.emit(
                Prepare(self.id, link.peer, info, facts.first_token, end, bool(digest), digest == "full", nbytes)
            )

    def _take_digest(self, link: Link) -> None:
        """Have the canary taken while the last chunk is on its way; to whoever waits it is one more job."""
        assert self.facts is not None
        link.digested = True
        job = link.digest_job = self.book.new_job(link)
        link.jobs[job] = self.chunks[-1]
        full = self.book.peers[link.peer].digest == "full"
        end = match.end_tokens(self.facts, link.info)
        chunks, first = tuple(self.chunks), self.facts.first_token
        said = link.info.expected_bytes  # compared with this side's own number when the claim joined
        nbytes = link.own_bytes(self.facts) if said is None else said
        self.book.emit(Digest(job, self.id, link.peer, chunks, link.info, first, end, full, nbytes))

    def credit(self, link: Link, job: int, nbytes: int, landed: bool) -> None:
        """A job has ended and can't land or read anything any more."""
        del link.jobs[job]
        self.book.end_job(job)
        link.bytes_landed += nbytes
        link.chunks_landed += landed
        link.moved_at = self.book.now
        if self.state in rules.LIVE_OFFERS:
            link.talk.publish()  # progress is said on the next tick, if it is not the end
        else:
            link.publish()

    def release(self) -> None:
        """The pages are free; once."""
        assert not self.released
        self.released = True
        self.book.emit(Release(Kind.OFFER, self.id))

    def fail(self, reason: Reason) -> None:
        """Tell every claim, post nothing more, wait for what is out."""
        self.reason = reason
        self.failed_at = self.book.now
        self.book.bury(self)
        for link in self.links:
            for job in link.jobs:
                self.book.emit(Stop(job))
            if not link.over:
                link.phase = StatusPhase.FAILED
                link.reason = reason
                link.publish()

    def quarantine(self) -> None:
        """Not proven quiet in time: count it; the pages stay out of use."""
        self.book.counts["quarantined"] += 1

    # -- helpers

    def _next_chunk(self, link: Link) -> Chunk | None:
        if self.facts is None or link.over or not link.info.elected or link.info.phase is not InfoPhase.PAGES:
            return None
        if link.posted >= len(self.chunks) or len(link.jobs) >= rules.JOBS_PER_LINK:
            return None
        chunk = self.chunks[link.posted]
        return None if chunk.number in self.not_ready else chunk

    def _wants_digest(self, link: Link) -> bool:
        if self.state not in rules.LIVE_OFFERS or link.digested or not link.posted or not self.chunks[-1].last:
            return False
        record = self.book.peers.get(link.peer)
        return link.posted == len(self.chunks) and record is not None and bool(record.digest)

    def _consider_link(self, link: Link) -> None:
        last_known = bool(self.chunks) and self.chunks[-1].last
        if link.over or link.jobs or not last_known or link.info.phase is not InfoPhase.PAGES:
            return
        if self.not_ready or (link.info.elected and link.posted < len(self.chunks)):
            return
        link.phase = StatusPhase.DELIVERED
        link.publish()

    def _watch(self, now: float) -> None:
        limit_s = self.book.times.stall_s
        for link in self.links:
            link.tell_progress(now)
            writing = link.jobs.keys() - {link.digest_job}  # a digest is this side's own work, it moves no byte
            if writing and now - link.moved_at >= limit_s:
                cause = f"no byte landed for {limit_s:g} s, {link.bytes_landed} bytes landed before"
                self.failing(
                    self.book.where.reason(Code.STALLED, cause, peer=self.book.named(link.peer), stage="transfer")
                )
                return

    def _no_claim(self) -> None:
        cause = f"{len(self.links)} of {self.fan_in or 'an unknown number of'} claims came within "
        cause += f"{self.book.times.claim_timeout_s:g} s"
        if self.refusal:
            cause += f"; the last one refused: {self.refusal}"
        elif self.book.refused_peer:
            cause += f"; the last peer refused at the handshake: {self.book.refused_peer}"
        self.failing(self.book.where.reason(Code.NO_CLAIM, cause, stage="waiting for claims"))
