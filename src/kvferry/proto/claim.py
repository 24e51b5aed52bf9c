"""The receiver's room: a claim, and a view of each source that it hears from.

The methods named in rules.CLAIM are that table's actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvferry.errors import Blame, Code, InputError, Reason
from kvferry.ids import KVPoll, PeerId
from kvferry.proto import rules
from kvferry.proto.dialogue import Dialogue
from kvferry.proto.effects import ClaimFacts, Expose, Fence, Kind, Release, Revoke, Source, Verify, WriteAux
from kvferry.proto.rules import CLAIM, ClaimEvent, ClaimState, PeerState, fire
from kvferry.wire import InfoPhase, StatusPhase, TransferInfo, TransferStatus

if TYPE_CHECKING:
    from kvferry.proto.book import Book


class SourceView:
    """What a claim knows of one source."""

    def __init__(self, claim: Claim, source: Source) -> None:
        self.claim = claim
        self.source = source
        self.talk = Dialogue()
        self.status: TransferStatus | None = None
        self.expected_bytes: int | None = None
        self.exposed = False
        self.quiet_seen = False
        self.verifying = False
        self.verified = False
        self.differs = ""
        self.moved_at = 0.0

    @property
    def peer(self) -> PeerId:
        """The source."""
        return self.source.peer

    @property
    def quiet(self) -> bool:
        """Nothing of this source can land in the claim's pages, and nobody reads them to compare."""
        landed = not self.exposed or self.quiet_seen or self._peer_state in rules.PROVES_QUIET
        return landed and not self.verifying

    @property
    def delivered(self) -> bool:
        """The source has sent all that it had to."""
        return self.status is not None and self.status.phase is StatusPhase.DELIVERED

    @property
    def settled(self) -> bool:
        """The source has seen the last snapshot, or can't any more."""
        return self.talk.settled or self._peer_state is not PeerState.READY

    @property
    def _peer_state(self) -> PeerState:
        record = self.claim.book.peers.get(self.peer)
        return record.state if record else PeerState.GONE

    def expect(self, facts: ClaimFacts) -> None:
        """Compute what this source has to send. Raises InputError where the numbers make no request."""
        size = self.source.size
        self.expected_bytes = size.request_bytes(facts.prefix_tokens, facts.end_tokens, facts.rows, self.source.sends)

    def merge(self, status: TransferStatus) -> None:
        """Take a newer status; what was proven once stays proven."""
        if status.quiet and status.phase in rules.QUIET_COUNTS_IN:
            self.quiet_seen = True
        self.moved_at = self.claim.book.now  # a source has news only where something moved
        self.status = status

    def message(self) -> TransferInfo:
        """The snapshot."""
        claim, facts = self.claim, self.claim.facts
        info = TransferInfo(
            room=claim.room, tag=claim.tag, claim=claim.id, rev=self.talk.rev, ack=self.talk.seen,
            want_ack=not self.talk.settled, phase=claim.phase, fan_in=self.source.fan_in,
            sends=self.source.sends, success=claim.state is ClaimState.SUCCESS,
            reason=claim.reason if claim.phase is InfoPhase.CLOSED else None, trace=claim.trace,
        )  # fmt: skip
        if claim.phase is not InfoPhase.PAGES or facts is None:
            return info
        return _with_pages(info, facts, self.expected_bytes)

    def publish(self) -> None:
        """What the source sees has changed."""
        self.talk.publish()
        self.claim.book.stale.append(self)


def _with_pages(info: TransferInfo, facts: ClaimFacts, expected_bytes: int | None) -> TransferInfo:
    return msgspec.structs.replace(
        info, pages=facts.pages, num_tokens=facts.num_tokens, prefix_tokens=facts.prefix_tokens,
        expected_bytes=expected_bytes,
    )  # fmt: skip


class Claim:
    """One room at one destination rank."""

    def __init__(self, book: Book, claim: int, room: int, tag: int, trace: str) -> None:
        self.book = book
        self.id = claim
        self.room = room
        self.tag = tag
        self.trace = trace
        self.state = ClaimState.RESOLVING
        self.looking = True
        self.phase = InfoPhase.OPEN
        self.facts: ClaimFacts | None = None
        self.views: dict[PeerId, SourceView] = {}
        self.reason: Reason | None = None
        self.opened_at = book.now
        self.exposed_at = 0.0
        self.failed_at = 0.0
        self.cleared = False
        self.released = False

    @property
    def poll(self) -> KVPoll:
        """The state for schedulers."""
        if self.state in rules.FAILED_CLAIMS:
            return KVPoll.Failed
        if self.state is ClaimState.SUCCESS:
            return KVPoll.Success
        if self.state is ClaimState.PAGES:
            return KVPoll.Transferring
        return KVPoll.WaitingForInput if self.accepted else KVPoll.Bootstrapping

    @property
    def accepted(self) -> bool:
        """Every source has answered."""
        return bool(self.views) and all(view.status is not None for view in self.views.values())

    @property
    def bytes_landed(self) -> int:
        """Bytes that the sources say have landed."""
        return sum(view.status.bytes_landed for view in self.views.values() if view.status)

    # -- events

    def consider(self) -> None:
        """Take what follows from the present state."""
        if self.state in rules.LIVE_CLAIMS:
            self._consider_views()
        if self.state in rules.DRAINS and all(view.quiet for view in self.views.values()):
            fire(CLAIM, self, ClaimEvent.DRAINED)
        self.book.changed(Kind.CLAIM, self)

    def resolved(self, sources: list[Source]) -> None:
        """The sources are known and shook hands; of a claim that has failed meanwhile they hear just that."""
        if self.state is ClaimState.QUIET:
            self.open(sources)
            return
        fire(CLAIM, self, ClaimEvent.RESOLVED, sources)
        if self.facts is not None:
            fire(CLAIM, self, ClaimEvent.METADATA, self.facts)

    def failing(self, reason: Reason) -> None:
        """Fail, unless it has ended already."""
        if fire(CLAIM, self, ClaimEvent.FAIL, reason):
            self.consider()
        else:
            self.book.counts["late"] += 1

    def deadlines(self, now: float) -> None:
        """Look at the clocks that run in this state."""
        times = self.book.times
        if self.state in rules.LIVE_CLAIMS:
            if not self.accepted and now - self.opened_at >= times.bootstrap_timeout_s:
                self._not_accepted()
            elif self.state is ClaimState.PAGES:
                self._stalled(now)
        elif self.state is ClaimState.DRAINING and now - self.failed_at >= times.drain_limit_s:
            fire(CLAIM, self, ClaimEvent.DRAIN_LIMIT)

    # -- actions of rules.CLAIM

    def store(self, facts: ClaimFacts) -> None:
        """Keep what send_metadata() said."""
        self.facts = facts
        self.tag = facts.tag or self.tag

    def open(self, sources: list[Source]) -> None:
        """Tell every source that a claim is coming, or that it will not come."""
        for source in sources:
            view = self.views[source.peer] = SourceView(self, source)
            self.book.peers[source.peer].claims.add(self.id)
            view.publish()

    def expose(self, facts: ClaimFacts) -> None:
        """Grant the pages and tell every source; from here on something may land."""
        try:
            for view in self.views.values():
                view.expect(facts)
        except InputError as error:
            self.failing(self.book.where.reason(Code.REFUSED, str(error), stage="send_metadata"))
            return
        self.phase = InfoPhase.PAGES
        self.exposed_at = self.book.now
        self.book.emit(Expose(self.id, tuple(self.views)))
        for view in self.views.values():
            view.exposed = True
            view.moved_at = self.book.now
            view.publish()

    def merge(self, view: SourceView, status: TransferStatus) -> None:
        """Take a newer status of one source."""
        view.merge(status)

    def judge(self, view: SourceView, cause: str) -> None:
        """What landed from one source was compared with what it sent."""
        view.verifying, view.verified, view.differs = False, True, cause

    def write_aux(self) -> None:
        """Put the metadata row into its slot; the first source that has one wins (the caller ordered them)."""
        if self._aux:
            self.book.emit(WriteAux(self.id, self._aux))

    def close(self, *_: object) -> None:
        """Tell every source that it is over, and withdraw what was granted."""
        self.phase = InfoPhase.CLOSED
        exposed = tuple(view.peer for view in self.views.values() if view.exposed)
        if exposed:
            self.book.emit(Revoke(self.id, exposed))
        for view in self.views.values():
            view.publish()

    def fail(self, reason: Reason) -> None:
        """Remember the first cause."""
        self.reason = reason
        self.failed_at = self.book.now

    def release(self, *_: object) -> None:
        """The pages are free; once."""
        assert not self.released
        self.released = True
        self.book.emit(Release(Kind.CLAIM, self.id))

    def quarantine(self) -> None:
        """Not proven quiet in time: count it, and ask the engine for a proof."""
        self.book.counts["quarantined"] += 1
        for view in self.views.values():
            if not view.quiet:
                self.book.emit(Fence(view.peer, self.id))

    # -- helpers

    def _consider_views(self) -> None:
        delivered = 0
        for view in self.views.values():
            status = view.status
            if status is None:
                continue
            if status.phase is StatusPhase.FAILED:
                reason = status.reason or self.book.where.reason(Code.INTERNAL, "the source gave no reason")
                self.failing(reason)
                return
            if status.phase is StatusPhase.DELIVERED:
                if status.bytes_landed != view.expected_bytes:
                    self.failing(self._bytes_differ(view, status))
                    return
                if view.differs:
                    self.failing(self._content_differs(view))
                    return
                delivered += self._is_verified(view, status)
                if self.state not in rules.LIVE_CLAIMS:
                    return
        if delivered and delivered == len(self.views):
            self._complete()

    @property
    def _aux(self) -> bytes:
        """The metadata row of the first source that sent one."""
        return next((view.status.aux for view in self.views.values() if view.status and view.status.aux), b"")

    def _complete(self) -> None:
        if self.facts is not None and self.facts.wants_aux and not self._aux:
            cause = "decode wants a metadata row, prefill sent none; pass aux_index on both sides"
            self.failing(self.book.where.reason(Code.REFUSED, cause, stage="delivery", blame=Blame.PEER))
        else:
            fire(CLAIM, self, ClaimEvent.COMPLETE)

    def _is_verified(self, view: SourceView, status: TransferStatus) -> bool:
        """Whether what landed equals what was sent, as far as a canary tells; true where none was agreed on."""
        record = self.book.peers.get(view.peer)
        agreed = record.digest if record else ""
        if view.verified or not agreed or not view.expected_bytes:
            return True
        if status.canary is None or status.canary.full != (agreed == "full"):
            self.failing(self._no_canary(view, agreed))
        elif not view.verifying and self.facts is not None:
            view.verifying = True
            self.book.emit(
                Verify(self.id, view.peer, status.canary, self.facts, status.bytes_landed, view.source.sends)
            )
        return False

    def _no_canary(self, view: SourceView, agreed: str) -> Reason:
        cause = f"both sides agreed on a digest ({agreed}), the source sent none, or another one"
        return self.book.where.reason(
            Code.CONTENT_DIFFERS, cause, peer=self.book.named(view.peer), stage="delivery", blame=Blame.PEER
        )

    def _content_differs(self, view: SourceView) -> Reason:
        cause = f"the bytes that landed are not those that were sent: {view.differs}"
        return self.book.where.reason(
            Code.CONTENT_DIFFERS, cause, peer=self.book.named(view.peer), stage="delivery", blame=Blame.ENGINE
        )

    def _bytes_differ(self, view: SourceView, status: TransferStatus) -> Reason:
        cause = f"the source says {status.bytes_landed} bytes landed, {view.expected_bytes} were expected"
        return self.book.where.reason(Code.BYTES_DIFFER, cause, peer=self.book.named(view.peer), stage="delivery")

    def _not_accepted(self) -> None:
        silent = [self.book.named(view.peer) for view in self.views.values() if view.status is None]
        seconds = f"{self.book.times.bootstrap_timeout_s:g} s"
        cause = f"{len(silent)} of {len(self.views)} sources did not accept the room within {seconds}"
        if not self.views:
            missing = self.book.looks_for(self.id)
            cause = f"the prefill side's ranks were not reached within {seconds}{missing and f': {missing}'}"
        self.failing(
            self.book.where.reason(Code.BOOTSTRAP_TIMEOUT, cause, peer=", ".join(silent), stage="handshake of the room")
        )

    def _stalled(self, now: float) -> None:
        times = self.book.times
        for view in self.views.values():
            status = view.status
            writing = status is not None and status.chunks_landed < status.chunks_total
            if writing and not view.quiet_seen and now - view.moved_at >= times.stall_s:
                cause = f"no progress for {times.stall_s:g} s, {self.bytes_landed} bytes landed before"
                self.failing(
                    self.book.where.reason(Code.STALLED, cause, peer=self.book.named(view.peer), stage="transfer")
                )
                return
        if times.hold_limit_s and now - self.exposed_at >= times.hold_limit_s:
            cause = f"pages were held for {times.hold_limit_s:g} s (hold_limit_s)"
            self.failing(self.book.where.reason(Code.HOLD_LIMIT, cause, stage="waiting for the source"))
