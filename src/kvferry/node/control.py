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

from kvferry.errors import Blame, Code, EngineError, Reason, WireError
from kvferry.ids import KVPoll, PeerId
from kvferry.node.batching import chunk_batches
from kvferry.node.conns import Conn, lost_reason
from kvferry.node.links import Received
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
from kvferry.proto.handshake import Handshake
from kvferry.proto.offer import Offer
from kvferry.proto.rules import LIVE_OFFERS, PeerState
from kvferry.wire import (
    NEEDS_FEATURE,
    Bye,
    Frame,
    Hello,
    InfoPhase,
    KVArgsRegisterInfo,
    Refused,
    TransferInfo,
    decode,
    encode,
)

if TYPE_CHECKING:
    from kvferry.node.node import Node

log = logging.getLogger("kvferry.node")

AFTER_POLL_S = 0.001
IDLE_POLL_S = 1.0
MAX_STRANGERS = 10_000
"""Accepted connections that have not finished the handshake; more are ignored."""


class Control:
    """The thread and its loop."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.book = node.book
        self.conns = node.conns
        self.links = node.links
        self.calls: deque[Callable[[], None]] = deque()
        self.waiting_after: list[tuple[int, int, Callable[[], bool]]] = []
        self.running = True
        self.ended: Reason | None = None
        self.beat = time.monotonic()
        self._next_tick = 0.0
        self.thread = threading.Thread(target=self._main, name="kvferry-control", daemon=True)

    # -- any thread

    def call(self, action: Callable[[], None]) -> None:
        """Have the control thread do something soon."""
        self.calls.append(action)
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
        for received in self.links.poll(self._timeout()):
            self._received(received)
        while self.calls:
            self.calls.popleft()()
        if self.waiting_after:
            self._poll_after()
        self.perform()  # before the tick, which may forget a cleared room whose end is still to be shown
        now = self.beat = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + self.node.config.tick_s
            self.book.on_tick(now)
            self._tick_conns(now)
            self.node.claims.tick(now)
        self.perform()

    def _timeout(self) -> float:
        if self.calls:
            return 0.0
        if self.waiting_after:
            return AFTER_POLL_S
        if self.book.idle and all(conn.ready for conn in self.conns.by_link.values()):
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

    # -- frames

    def _received(self, received: Received) -> None:
        conn = self.conns.by_link.get(received.link)
        if received.data is None:
            if conn is not None:
                self.lose(conn, "the connection was closed or its heartbeats stopped")
            return
        if not received.data:  # a probe
            if conn is None:
                self.links.drop(received.link)
            return
        try:
            frame = decode(received.data)
        except WireError as error:
            self._dropped("malformed", received.link.address, str(error))
            if conn is None:
                self.links.drop(received.link)
            return
        if conn is None:
            conn = self._stranger(received, frame)
        if conn is not None:
            self._frame(conn, frame)
            self.perform()

    def _stranger(self, received: Received, frame: Frame) -> Conn | None:
        waiting = sum(not conn.ready for conn in self.conns.by_link.values())
        if not isinstance(frame.message, Hello) or waiting > MAX_STRANGERS:
            self._dropped("foreign", received.link.address, "no handshake")
            self.links.drop(received.link)
            return None
        handshake = Handshake(self.node.incarnation, self.node.register_info(), self.node.where, None)
        conn = Conn(received.link, handshake, deadline=time.monotonic() + self.node.config.bootstrap_timeout_s)
        return self.conns.add(conn)

    def _frame(self, conn: Conn, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, (Hello, KVArgsRegisterInfo, Refused)):
            problem = self._pretence(conn, frame)
            if problem:
                self._dropped("foreign", conn.link.address, problem)
                return
            conn.handshake.hear(message)
            self._progress(conn)
        elif frame.source != conn.peer or frame.destination != conn.handshake.me:
            self._dropped("foreign", conn.link.address, f"{frame.source} to {frame.destination}")
        elif isinstance(message, Bye):
            self.lose(conn, "the peer said goodbye", message.reason)
        elif not conn.ready:
            self._dropped("foreign", conn.link.address, "the handshake is not over")
        else:
            if isinstance(message, TransferInfo) and message.reason is not None:
                conn.hear_reason(message.reason)
            self.book.receive(time.monotonic(), frame.source, message)  # type: ignore[arg-type]

    def _pretence(self, conn: Conn, frame: Frame) -> str:
        """Why a message of the handshake does not come from whom it says; "" if it may."""
        name = frame.message.peer if isinstance(frame.message, Hello) else conn.peer
        if frame.source != name:
            return f"{frame.source} speaks for {name}"
        if conn.peer is not None:
            return "" if name == conn.peer else f"{conn.peer} calls itself {name} now"
        taken = any(other.peer == name for other in self.conns.by_link.values())
        return f"{name} has another connection" if taken else ""

    def _dropped(self, what: str, address: str, cause: str) -> None:
        """Count a frame that was not taken; a flood of them fills no log."""
        count = self.book.counts[what] = self.book.counts[what] + 1
        if count & (count - 1) == 0:
            log.warning("dropped %d %s frames so far, the last one from %s: %s", count, what, address, cause)

    # -- connections

    def _progress(self, conn: Conn) -> None:
        """Go on with a handshake as far as it goes."""
        shake = conn.handshake
        if self.node.is_prefill and shake.theirs is not None and not conn.attaching and shake.peer is not None:
            conn.attaching = True
            self.conns.by_peer[shake.peer] = conn
            if self.node.problem:
                shake.attached(self.node.problem)
            else:
                self.node.mover.attach(shake.peer, shake.theirs.engines[self.node.engine_name])
        if conn.ready and not conn.announced:
            conn.announced = True
            self.conns.accept(conn, self.node.is_prefill)
            assert conn.peer is not None
            assert conn.route is not None
            self.book.peer_ready(time.monotonic(), conn.peer, conn.route)
            for older in self.conns.older(conn):
                self.lose(older, f"another connection to the same process, {conn.peer}, replaced this one")
            self.node.claims.look()
        if shake.state is PeerState.REFUSED and conn.reason is None:
            conn.reason = shake.reason
            log.warning("peer %s refused: %s", conn.link.address, shake.reason)
            if conn.announced:
                self.lose(conn, f"the peer has refused: {shake.reason}")
                return
            self.node.claims.look()
        self.speak(conn, repeat=False)

    def attached(self, peer: PeerId, cause: str) -> None:
        """The mover has connected the engine to a peer, or not; anew, where a write to it had failed."""
        conn = self.conns.by_peer.get(peer)
        if conn is not None and not conn.announced:
            conn.handshake.attached(cause)
            self._progress(conn)
        elif conn is not None and cause:
            text = f"the engine can't reach the peer any more: {cause}"
            more = {"peer": str(peer), "stage": "transfer", "blame": Blame.ENGINE}
            self._part(conn, self.node.where.reason(Code.UNREACHABLE, text, **more))

    def speak(self, conn: Conn, *, repeat: bool) -> None:
        """Send what the handshake has to say; `repeat`: a heartbeat has passed."""
        shake = conn.handshake
        for message in shake.say(repeat):
            self.transmit(conn, Frame(shake.me, shake.peer, message))

    def transmit(self, conn: Conn, frame: Frame) -> None:
        """Hand a frame to a connection; a kind of message that the peer does not know is not sent."""
        feature = NEEDS_FEATURE.get(type(frame.message))
        if feature is not None and feature not in conn.handshake.features:
            return
        if not self.links.send(conn.link, encode(frame)):
            self.lose(conn, "the connection is gone")

    def lose(self, conn: Conn, cause: str, reason: Reason | None = None) -> None:
        """A connection is gone: its rooms fail, with the peer's own reason if it gave one; nothing is released."""
        if self.conns.by_link.get(conn.link) is not conn:
            return
        reason = reason or lost_reason(self.node.where, conn, cause)
        conn.reason = conn.reason or reason
        addresses = self.conns.remove(conn)
        self.links.drop(conn.link)
        if conn.peer is not None:
            self.book.peer_lost(time.monotonic(), conn.peer, reason)
            if self.node.is_prefill:
                self.node.mover.detach(conn.peer)
        self.node.claims.connection_ended(conn, addresses)

    def _tick_conns(self, now: float) -> None:
        """Repeat handshakes, probe accepted connections, give up on those that never become ready."""
        heartbeat_s = self.node.config.heartbeat_s
        for conn in list(self.conns.by_link.values()):
            if not conn.ready:
                repeat = now >= conn.speak_at
                if repeat:
                    conn.speak_at = now + heartbeat_s
                self.speak(conn, repeat=repeat)
                if now >= conn.deadline:
                    self.lose(conn, f"no handshake within {self.node.config.bootstrap_timeout_s:g} s")
            elif now >= conn.probe_at:
                self.speak(conn, repeat=False)
                conn.probe_at = now + heartbeat_s
                if not self.links.send(conn.link, b""):
                    self.lose(conn, "the connection is gone (heartbeats stopped, or the process ended)")

    # -- effects

    def perform(self) -> None:
        """Do what the book asks for."""
        while effects := self.book.take_effects():
            for effect in effects:
                _DO[type(effect)](self, effect)

    def _send(self, effect: Send) -> None:
        conn = self.conns.by_peer.get(effect.peer)
        if conn is not None:
            self.transmit(conn, Frame(conn.handshake.me, effect.peer, effect.message))

    def _submit(self, effect: Submit) -> None:
        conn = self.conns.by_peer.get(effect.peer)
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

    def dismiss(self, reason: Reason) -> None:
        """Say goodbye to every peer; they shake hands anew when they need to."""
        for conn in list(self.conns.by_link.values()):
            self._part(conn, reason)

    def _part(self, conn: Conn, reason: Reason) -> None:
        """Say goodbye, with the reason for the rooms of both ends."""
        if conn.peer is not None:
            self.links.send(conn.link, encode(Frame(conn.handshake.me, conn.peer, Bye(reason))))
        self.lose(conn, reason.cause, reason)

    def leave(self, reason: Reason) -> None:
        """Say goodbye to every peer and end the loop."""
        for conn in list(self.conns.by_link.values()):
            if conn.peer is not None:
                self.links.send(conn.link, encode(Frame(conn.handshake.me, conn.peer, Bye(reason))))
        self.running = False
        self._fail_rooms(reason)


_DO: dict[type, Callable[[Control, Any], None]] = {
    Send: Control._send, Submit: Control._submit, Stop: Control._stop, Release: Control._release,
    Changed: Control._changed, WriteAux: Control._write_aux, Expose: Control._expose, Revoke: Control._revoke,
    Fence: Control._fence, Forget: Control._forget,
}  # fmt: skip
