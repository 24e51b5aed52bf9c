"""The control thread: it owns the sockets, the timers and all room state of a node.

It never waits for anything but its sockets: commands come from schedulers' threads, news from the mover and the
resolver, all as calls in one queue behind one descriptor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.errors import Code, EngineError, Reason
from kvferry.ids import KVPoll
from kvferry.node.batching import chunk_batches
from kvferry.node.switchboard import Switchboard
from kvferry.node.view import RoomView
from kvferry.proto.effects import (
    Changed,
    Expose,
    Fence,
    Forget,
    Kind,
    Release,
    Revoke,
    Send,
    Stop,
    Submit,
    WriteAux,
)
from kvferry.proto.offer import Offer
from kvferry.proto.rules import LIVE_OFFERS
from kvferry.wire import Frame, InfoPhase

if TYPE_CHECKING:
    from kvferry.node.node import Node

log = logging.getLogger("kvferry.node")

AFTER_POLL_S = 0.001
IDLE_POLL_S = 1.0


class Control:
    """The thread and its loop."""

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
        self._sleeping = False
        self._next_tick = 0.0
        self.thread = threading.Thread(target=self._main, name="kvferry-control", daemon=True)

    # -- any thread

    def call(self, action: Callable[[], None]) -> None:
        """Have the control thread do something soon.

        Only a sleeping thread is woken: the write would hand the interpreter over to it, and the caller would get it
        back only a switch interval (5 ms) later, if the thread is busy.
        """
        self.calls.append(action)
        if self._sleeping:
            self._sleeping = False
            self.links.wake()

    def run(self, action: Callable[[], None]) -> None:
        """Have the control thread do something, and wait for it; not for schedulers' calls."""
        done = threading.Event()

        def call() -> None:
            action()
            done.set()

        self.call(call)
        if not done.wait(30.0):
            raise EngineError("the control thread did not answer within 30 s", hint="see health()")

    # -- the thread

    def _main(self) -> None:
        try:
            while self.running:
                self._step()
        except Exception as error:
            log.exception("the control thread died")
            problem = f"the control thread died: {error!r}"
            self.node.broken(problem)
            self._fail_rooms(self.node.where.reason(Code.INTERNAL, problem, stage="node"))
        finally:
            self.links.close()

    def _fail_rooms(self, reason: Reason) -> None:
        """The thread ends: nobody else will tell those who wait, whether their rooms came to the book or not."""
        self.ended = reason
        for view in list(self.node.opening):
            view.end(reason)
        for view in list(self.node.views.values()):
            view.update(KVPoll.Failed, reason, foreign=False, bytes_landed=view.bytes_landed)

    def _step(self) -> None:
        self._sleeping = True  # before the queue is looked at: who adds to it from here on wakes us
        for received in self.links.poll(self._timeout()):
            self._sleeping = False
            self.board.received(received)
            self.perform()
        self._sleeping = False
        while self.calls:
            self.calls.popleft()()
        if self.waiting_after:
            self._poll_after()
        self.perform()  # before the tick, which may forget a cleared room whose end is still to be shown
        now = self.beat = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + self.node.config.tick_s
            self.book.on_tick(now)
            self.board.tick(now)
            self.node.claims.tick(now)
        self.perform()

    def _timeout(self) -> float:
        if self.calls:
            return 0.0
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
        self.node.mover.write(effect.job, effect.peer, lambda: chunk_batches(route, effect, limits))

    def _stop(self, effect: Stop) -> None:
        self.node.mover.stop(effect.job)

    def _release(self, effect: Release) -> None:
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
        facts = self.book.claims[effect.claim].facts
        assert facts is not None
        self.node.grant(effect.peers, effect.claim, facts.pages)
        view = self.node.views.get((Kind.CLAIM, effect.claim))
        if view is not None:
            view.pages_s = time.monotonic()

    def _revoke(self, effect: Revoke) -> None:
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
    Send: Control._send, Submit: Control._submit, Stop: Control._stop, Release: Control._release,
    Changed: Control._changed, WriteAux: Control._write_aux, Expose: Control._expose, Revoke: Control._revoke,
    Fence: Control._fence, Forget: Control._forget,
}  # fmt: skip
