"""The control thread: it owns the sockets, the timers and all room state of a node.

It never waits for anything but its sockets: commands come from schedulers' threads, news from the mover and the
resolver, all as calls in one queue behind one descriptor. Ownership is a lock, the *turn*: a scheduler's or the
mover's thread that finds it free takes it, does what is short, and gives it back, which saves a room the way through
sleeping threads (ADR 0007). Handshakes, ticks and losses stay with the thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.errors import Code, EngineError, Reason
from kvferry.ids import KVPoll, PeerId
from kvferry.node.batching import chunk_batches
from kvferry.node.digests import landed, sent
from kvferry.node.switchboard import Switchboard
from kvferry.node.view import RoomView
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
from kvferry.proto.rules import LIVE_OFFERS
from kvferry.wire import Frame, InfoPhase

if TYPE_CHECKING:
    from kvferry.node.node import Node

log = logging.getLogger("kvferry.node")

FRAMES_A_TURN = 32
"""Frames of one connection that a thread takes in passing."""

POLLED_S = 0.005
"""So long after a poll() the thread leaves the news to the next one."""

AFTER_POLL_S = 0.001
IDLE_POLL_S = 1.0


class Control:
    """The thread, its loop, and the turns that others take in its place."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.book = node.book
        self.links = node.links
        self.board = Switchboard(node)
        self.calls: deque[Callable[[], None]] = deque()
        self.waiting_after: list[tuple[int, int, Callable[[], bool]]] = []
        self.running = True
        self.ended: Reason | None = None
        self.beat = time.monotonic()
        self._later: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()
        self._helper = threading.local()
        self._polled_at = 0.0
        self._pause_s = 0.0
        self._wakes_at = 0.0
        self._next_tick = 0.0
        self.thread = threading.Thread(target=self._main, name="kvferry-control", daemon=True)

    # -- any thread

    def call(self, action: Callable[[], None]) -> None:
        """Have something short done soon: here and now, unless another thread has the turn."""
        self.calls.append(action)
        if not getattr(self._helper, "at_it", False):
            self.help()

    def poll(self) -> None:
        """A scheduler asks for a room that has not ended: take the news for it."""
        self._polled_at = time.monotonic()
        if self.calls or self.links.has_news():
            self.help()

    def later(self, action: Callable[[], None]) -> None:
        """Have the thread itself do something that may take milliseconds."""
        self._later.append(action)
        self.links.wake()

    def help(self) -> None:
        """Do what there is to do, unless another thread is at it: that one looks again when it is through.

        Never waits. Nobody holds the turn while bytes are copied: what was posted is written after it.
        """
        self._helper.at_it = True
        try:
            while self.running and (self.calls or self.links.has_news()) and self._turn.acquire(blocking=False):
                try:
                    wake = self._short_turn()
                finally:
                    self._turn.release()
                self._help_others()
                if wake:
                    self.links.wake()
                    return
        finally:
            self._helper.at_it = False

    def _help_others(self) -> None:
        """What was posted during the turn and is small."""
        self.node.mover.help()
        self.node.digests.help()

    def run(self, action: Callable[[], None]) -> None:
        """Have the control thread do something, and wait for it; not for schedulers' calls."""
        done = threading.Event()

        def call() -> None:
            action()
            done.set()

        self.later(call)
        if not done.wait(30.0):
            raise EngineError("the control thread did not answer within 30 s", hint="see health()")

    # -- whoever has the turn

    def _short_turn(self) -> bool:
        """Take a few frames and all calls; returns whether the thread must be woken."""
        if not self.running:
            return False
        try:
            for received in self.links.take(FRAMES_A_TURN):
                if self.board.is_short(received):
                    self.board.received(received)
                    self.perform()
                else:
                    self._later.append(partial(self.board.received, received))
            if self._later:  # what came first goes first: the thread does both
                return True
            self._take_calls()
            return self.links.has_news() or self._oversleeps()
        except Exception as error:  # noqa: BLE001 - whatever it is, no state can be relied on any more
            self._die(error)
            return True

    def _oversleeps(self) -> bool:
        """Whether the thread, left alone, wakes too late for what has begun meanwhile."""
        sleeps_s = self._wakes_at - time.monotonic()
        if self.waiting_after:
            return sleeps_s > 2 * AFTER_POLL_S
        return sleeps_s > self.node.config.tick_s + 2 * AFTER_POLL_S and self._timeout() < sleeps_s

    def _take_calls(self) -> None:
        while self.calls:
            self.calls.popleft()()
        if self.waiting_after:
            self._poll_after()
        self.perform()

    # -- the thread

    def _main(self) -> None:
        while self.running:
            self._sleep()
            with self._turn:
                self._long_turn()
            self._help_others()
        with self._turn:
            self.links.close()

    def _sleep(self) -> None:
        """Leave the news to a scheduler that polls: it comes sooner than a thread that waits for the interpreter."""
        polled_s = time.monotonic() - self._polled_at
        if self.calls or self._later:
            self.links.wait(0.0)
        elif polled_s < POLLED_S:
            pause_s = min(POLLED_S, self._pause_s)
            self._wakes_at = time.monotonic() + pause_s
            self.links.wait(pause_s, for_news=False)
        else:
            self.links.wait(self._pause_s)

    def _long_turn(self) -> None:
        try:
            while self._later:
                self._later.popleft()()
                self.perform()
            for received in self.links.take():
                self.board.received(received)
                self.perform()
            self._take_calls()  # before the tick, which may forget a cleared room whose end is still to be shown
            now = self.beat = time.monotonic()
            if now >= self._next_tick:
                self._next_tick = now + self.node.config.tick_s
                self.book.on_tick(now)
                self.board.tick(now)
                self.node.claims.tick(now)
            self.perform()
            self._pause_s = self._timeout()
            self._wakes_at = time.monotonic() + self._pause_s
        except Exception as error:  # noqa: BLE001 - whatever it is, no state can be relied on any more
            self._die(error)

    def _die(self, error: Exception) -> None:
        """What must not happen: no state can be relied on any more, so every room fails and the thread ends."""
        self.running = False
        log.error("the control thread died", exc_info=error)
        problem = f"the control thread died: {error!r}"
        self.node.problem = self.node.problem or problem
        self._fail_rooms(self.node.where.reason(Code.INTERNAL, problem, stage="node"))

    def _fail_rooms(self, reason: Reason) -> None:
        """The thread ends: nobody else will tell those who wait, whether their rooms came to the book or not."""
        self.ended = reason
        for view in list(self.node.opening):
            view.end(reason)
        for view in list(self.node.views.values()):
            view.update(KVPoll.Failed, reason, foreign=False, bytes_landed=view.bytes_landed)

    def _timeout(self) -> float:
        if self.waiting_after:
            return AFTER_POLL_S
        if self.book.idle and all(conn.ready for conn in self.board.conns.by_link.values()):
            self._next_tick = min(self._next_tick, time.monotonic() + IDLE_POLL_S)
            return IDLE_POLL_S
        return max(0.0, self._next_tick - time.monotonic()) + 0.001

    def _poll_after(self) -> None:
        """Ask the events that chunks wait for."""
        still = []
        for offer, chunk, query in self.waiting_after:
            if not self._sends(offer):
                continue
            try:
                done = query()
            except Exception as error:  # noqa: BLE001 - the caller's object; the room fails, nothing else
                cause = f"the chunk's `after` object raised in query(): {error!r}"
                reason = self.node.where.reason(Code.INTERNAL, cause, stage="send")
                self.book.fail(time.monotonic(), Kind.OFFER, offer, reason)
                continue
            if done:
                self.book.chunk_ready(time.monotonic(), offer, chunk)
            else:
                still.append((offer, chunk, query))
        self.waiting_after = still

    def _sends(self, number: int) -> bool:
        offer = self.book.offers.get(number)
        return offer is not None and offer.state in LIVE_OFFERS

    # -- effects

    def perform(self) -> None:
        """Do what the book asks for."""
        while effects := self.book.take_effects():
            for effect in effects:
                _DO[type(effect)](self, effect)

    def _send(self, effect: Send) -> None:
        conn = self.board.conns.by_peer.get(effect.peer)
        if conn is not None:
            self.board.transmit(conn, Frame(conn.handshake.me, effect.peer, effect.message))

    def _submit(self, effect: Submit) -> None:
        conn = self.board.conns.by_peer.get(effect.peer)
        if conn is None or conn.route is None:
            self.book.job_failed(time.monotonic(), effect.job, "the connection is gone", quiet=True)
            return
        route, limits = conn.route, self.node.limits
        most = effect.info.expected_bytes
        size = sys.maxsize if most is None else most
        self.node.mover.write(effect.job, effect.peer, lambda: chunk_batches(route, effect, limits), size)

    def _prepare(self, effect: Prepare) -> None:
        conn = self.board.conns.by_peer.get(effect.peer)
        if conn is not None and conn.route is not None:
            self.node.digests.prepare(Kind.OFFER, effect.offer, effect.peer, sent(conn.route, effect))

    def _digest(self, effect: Digest) -> None:
        conn = self.board.conns.by_peer.get(effect.peer)
        if conn is None or conn.route is None:
            self.book.job_failed(time.monotonic(), effect.job, "the connection is gone", quiet=True)
        else:
            self.node.digests.take(conn.route, effect)

    def _verify(self, effect: Verify) -> None:
        conn = self.board.conns.by_peer.get(effect.peer)
        if conn is None or conn.route is None:
            cause = "the connection is gone, nothing can be compared"
            self.book.verified(time.monotonic(), effect.claim, effect.peer, cause)
        else:
            self.node.digests.verify(conn.route, effect)

    def _stop(self, effect: Stop) -> None:
        self.node.mover.stop(effect.job)

    def _release(self, effect: Release) -> None:
        self.node.digests.forget(effect.kind, effect.id)
        view = self.node.views.get((effect.kind, effect.id))
        if view is not None:
            view.release()

    def _changed(self, effect: Changed) -> None:
        view = self.node.views.get((effect.kind, effect.id))
        thing = self.book.room(effect.kind, effect.id)
        if view is None or thing is None:
            return
        if isinstance(thing, Offer) and thing.links:
            self._learn_prefix(view, thing)
        where = self.node.where
        foreign = thing.reason is not None and (thing.reason.side, thing.reason.rank) != (
            where.side,
            where.rank,
        )
        landed = thing.bytes_landed
        view.update(thing.poll, thing.reason, foreign, landed)

    @staticmethod
    def _learn_prefix(view: RoomView, offer: Offer) -> None:
        if all(link.info.phase is InfoPhase.PAGES for link in offer.links):
            view.prefix_tokens = min(link.info.prefix_tokens for link in offer.links)

    def _write_aux(self, effect: WriteAux) -> None:
        self.node.claims.write_aux(effect.claim, effect.aux)

    def _expose(self, effect: Expose) -> None:
        claim = self.book.claims[effect.claim]
        facts = claim.facts
        assert facts is not None
        self.node.grant(effect.peers, effect.claim, facts.pages)
        for peer in effect.peers:
            self._expect_content(claim, peer, facts)
        view = self.node.views.get((Kind.CLAIM, effect.claim))
        if view is not None:
            view.pages_s = time.monotonic()

    def _expect_content(self, claim: Claim, peer: PeerId, facts: ClaimFacts) -> None:
        conn, digest = self.board.conns.by_peer.get(peer), self.book.peers[peer].digest
        nbytes = claim.views[peer].expected_bytes or 0
        if conn is not None and conn.route is not None and digest and nbytes:
            looks = landed(conn.route, facts, nbytes, full=digest == "full")
            self.node.digests.prepare(Kind.CLAIM, claim.id, peer, looks)

    def _revoke(self, effect: Revoke) -> None:
        self.node.digests.forget(Kind.CLAIM, effect.claim)
        for peer in effect.peers:
            self.node.grants.drop(peer, effect.claim)

    def _fence(self, effect: Fence) -> None:
        self.node.mover.fence(effect.peer, effect.claim)

    def _forget(self, effect: Forget) -> None:
        self.node.views.pop((effect.kind, effect.id), None)

    # -- the end

    def leave(self, reason: Reason) -> None:
        """Say goodbye to every peer and end the loop."""
        self.board.leave(reason)
        self.running = False
        self._fail_rooms(reason)


_DO: dict[type, Callable[[Control, Any], None]] = {
    Send: Control._send, Submit: Control._submit, Prepare: Control._prepare, Digest: Control._digest,
    Verify: Control._verify, Stop: Control._stop, Release: Control._release, Changed: Control._changed,
    WriteAux: Control._write_aux, Expose: Control._expose, Revoke: Control._revoke, Fence: Control._fence,
    Forget: Control._forget,
}  # fmt: skip
