"""What the book asks for, done: messages, jobs, digests, grants, what callers see. For who has the control's turn."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.ids import PeerId
from kvferry.node.batching import chunk_batches, prepared
from kvferry.node.digests import landed, sent
from kvferry.node.switchboard import Switchboard
from kvferry.node.view import RoomView
from kvferry.plan import Route, Target
from kvferry.proto.claim import Claim
from kvferry.proto.effects import (
    Changed,
    ClaimFacts,
    Digest,
    Expose,
    Fence,
    Forget,
    Kind,
    Prepare,
    Release,
    Revoke,
    Send,
    Stop,
    Submit,
    Verify,
    WriteAux,
)
from kvferry.proto.offer import Offer
from kvferry.wire import Frame, InfoPhase, TransferInfo

if TYPE_CHECKING:
    from kvferry.node.node import Node

log = logging.getLogger("kvferry.node")


class Performer:
    """One method for each effect."""

    def __init__(self, node: Node, board: Switchboard) -> None:
        self._node = node
        self._book = node.book
        self._board = board
        self._thanks: list[Send] = []
        self._targets: dict[int, dict[PeerId, tuple[TransferInfo, Target]]] = {}
        self._leaves_thanks = False

    @property
    def owes_thanks(self) -> bool:
        """Whether an earlier turn has left something to be sent."""
        return bool(self._thanks)

    def begin_turn(self, *, leaves_thanks: bool) -> None:
        """Send what an earlier turn has left, before anything that comes of later events.

        Args:
            leaves_thanks: what only thanks a source is left to the next turn: nobody waits for it, and to send it takes
                longer than all else that a scheduler's poll() does.
        """
        self._leaves_thanks = leaves_thanks
        thanks, self._thanks = self._thanks, []
        for effect in thanks:
            self._transmit(effect)

    def perform(self) -> None:
        """Do all of it, and what comes of it."""
        while self._book.effects:
            for effect in self._book.take_effects():
                _DO[type(effect)](self, effect)

    def _send(self, effect: Send) -> None:
        if self._leaves_thanks and _is_thanks(effect):
            self._thanks.append(effect)
        else:
            self._transmit(effect)

    def _transmit(self, effect: Send) -> None:
        conn = self._board.conns.by_peer.get(effect.peer)
        if conn is not None:
            self._board.transmit(conn, Frame(conn.handshake.me, effect.peer, effect.message))

    def _submit(self, effect: Submit) -> None:
        conn = self._board.conns.by_peer.get(effect.peer)
        if conn is None or conn.route is None:
            self._book.job_failed(time.monotonic(), effect.job, "the connection is gone", quiet=True)
            return
        route, limits = conn.route, self._node.limits
        most = effect.info.expected_bytes
        size = sys.maxsize if most is None else most
        info, target = self._targets.get(effect.offer, {}).get(effect.peer, (None, None))
        if info is not effect.info:  # the claim has said something else since
            target = None
        self._node.mover.write(
            effect.job, effect.peer, lambda: chunk_batches(route.only(effect.info.sends), effect, limits, target), size
        )

    def _prepare(self, effect: Prepare) -> None:
        conn = self._board.conns.by_peer.get(effect.peer)
        if conn is not None and conn.route is not None:
            try:
                self._prepare_link(conn.route, effect)
            except Exception as error:  # noqa: BLE001 - numbers of a peer; who sends to it is told, and fails alone
                log.debug("nothing is prepared for %s: %r", conn.name, error)

    def _prepare_link(self, route: Route, effect: Prepare) -> None:
        if effect.digested:
            self._node.digests.prepare(Kind.OFFER, effect.offer, effect.peer, sent(route, effect))
        target = prepared(route.only(effect.info.sends), effect, self._node.limits)
        if target is not None:
            self._targets.setdefault(effect.offer, {})[effect.peer] = effect.info, target

    def _digest(self, effect: Digest) -> None:
        conn = self._board.conns.by_peer.get(effect.peer)
        if conn is None or conn.route is None:
            self._book.job_failed(time.monotonic(), effect.job, "the connection is gone", quiet=True)
        else:
            self._node.digests.take(conn.route, effect)

    def _verify(self, effect: Verify) -> None:
        conn = self._board.conns.by_peer.get(effect.peer)
        if conn is None or conn.route is None:
            cause = "the connection is gone, nothing can be compared"
            self._book.verified(time.monotonic(), effect.claim, effect.peer, cause)
        else:
            self._node.digests.verify(conn.route, effect)

    def _stop(self, effect: Stop) -> None:
        self._node.mover.stop(effect.job)

    def _release(self, effect: Release) -> None:
        self._node.digests.forget(effect.kind, effect.id)
        if effect.kind is Kind.OFFER:
            self._targets.pop(effect.id, None)
        view = self._node.views.get((effect.kind, effect.id))
        if view is not None:
            view.release()

    def _changed(self, effect: Changed) -> None:
        view = self._node.views.get((effect.kind, effect.id))
        thing = self._book.room(effect.kind, effect.id)
        if view is None:
            return
        if isinstance(thing, Offer) and thing.links:
            self._learn_prefix(view, thing)
        where, reason = self._node.where, effect.reason
        foreign = reason is not None and (reason.side, reason.rank) != (where.side, where.rank)
        view.claims_success = effect.claims_success
        view.update(effect.poll, reason, foreign, effect.bytes_landed)

    @staticmethod
    def _learn_prefix(view: RoomView, offer: Offer) -> None:
        if all(link.info.phase is InfoPhase.PAGES for link in offer.links):
            view.prefix_tokens = min(link.info.prefix_tokens for link in offer.links)

    def _write_aux(self, effect: WriteAux) -> None:
        self._node.claims.write_aux(effect.claim, effect.aux)

    def _expose(self, effect: Expose) -> None:
        claim = self._book.claims[effect.claim]
        facts = claim.facts
        assert facts is not None
        self._node.exposed.add(effect.claim)
        self._node.grant(effect.peers, effect.claim, facts.pages)
        for peer in effect.peers:
            self._expect_content(claim, peer, facts)
        view = self._node.views.get((Kind.CLAIM, effect.claim))
        if view is not None:
            view.pages_s = time.monotonic()

    def _expect_content(self, claim: Claim, peer: PeerId, facts: ClaimFacts) -> None:
        conn, digest = self._board.conns.by_peer.get(peer), self._book.peers[peer].digest
        view = claim.views[peer]
        nbytes = view.expected_bytes or 0
        if conn is not None and conn.route is not None and digest and nbytes:
            looks = landed(conn.route.only(view.source.sends), facts, nbytes, full=digest == "full")
            self._node.digests.prepare(Kind.CLAIM, claim.id, peer, looks)

    def _revoke(self, effect: Revoke) -> None:
        self._node.digests.forget(Kind.CLAIM, effect.claim)
        self._node.exposed.discard(effect.claim)
        for peer in effect.peers:
            self._node.grants.drop(peer, effect.claim)

    def _fence(self, effect: Fence) -> None:
        self._node.mover.fence(effect.peer, effect.claim)

    def _forget(self, effect: Forget) -> None:
        self._node.views.pop((effect.kind, effect.id), None)


def _is_thanks(effect: Send) -> bool:
    message = effect.message
    return isinstance(message, TransferInfo) and message.phase is InfoPhase.CLOSED and message.reason is None


_DO: dict[type, Callable[[Performer, Any], None]] = {
    Send: Performer._send, Submit: Performer._submit, Prepare: Performer._prepare, Digest: Performer._digest,
    Verify: Performer._verify, Stop: Performer._stop, Release: Performer._release, Changed: Performer._changed,
    WriteAux: Performer._write_aux, Expose: Performer._expose, Revoke: Performer._revoke, Fence: Performer._fence,
    Forget: Performer._forget,
}  # fmt: skip
