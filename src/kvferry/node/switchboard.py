"""The connections of a node at work: frames in and out, handshakes, losses. Used by the control thread only."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvferry.config import DIGESTS
from kvferry.errors import Blame, Code, Reason, WireError
from kvferry.ids import PeerId
from kvferry.node.conns import Conn, lost_reason
from kvferry.node.links import Received
from kvferry.proto.handshake import Handshake
from kvferry.proto.rules import PeerState
from kvferry.wire import (
    NEEDS_FEATURE,
    Bye,
    Frame,
    Hello,
    KVArgsRegisterInfo,
    Refused,
    TransferInfo,
    decode,
    encode,
)

if TYPE_CHECKING:
    from kvferry.node.node import Node

log = logging.getLogger("kvferry.node")

MAX_STRANGERS = 10_000
"""Accepted connections that have not finished the handshake; more are ignored."""


class Switchboard:
    """Takes frames to the book and the book's messages to their connections."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.book = node.book
        self.conns = node.conns
        self.links = node.links

    # -- frames

    def is_short(self, received: Received) -> bool:
        """Whether to take it is a matter of microseconds: a frame of a peer that has shaken hands."""
        conn = self.conns.by_link.get(received.link)
        return conn is not None and conn.ready and conn.announced and received.data is not None

    def received(self, received: Received) -> None:
        """Take a frame, or the news that a connection is gone."""
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

    def _stranger(self, received: Received, frame: Frame) -> Conn | None:
        waiting = sum(not conn.ready for conn in self.conns.by_link.values())
        if not isinstance(frame.message, Hello) or waiting > MAX_STRANGERS:
            self._dropped("foreign", received.link.address, "no handshake")
            self.links.drop(received.link)
            return None
        handshake = Handshake(
            self.node.incarnation, self.node.register_info(frame.message.peer.epoch), self.node.where, None
        )
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
            digest = stronger(self.node.digest, conn.theirs.digest)
            self.book.peer_ready(time.monotonic(), conn.peer, conn.route, conn.name, digest)
            for older in self.conns.older(conn):
                self.lose(older, f"another connection to the same process, {conn.peer}, replaced this one")
            self.node.claims.look()
        if shake.state is PeerState.REFUSED and conn.reason is None:
            conn.reason = shake.reason
            self.book.refused_peer = str(shake.reason)
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

    def tick(self, now: float) -> None:
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
        """Say goodbye to every peer; the links are closed next."""
        for conn in list(self.conns.by_link.values()):
            if conn.peer is not None:
                self.links.send(conn.link, encode(Frame(conn.handshake.me, conn.peer, Bye(reason))))


def stronger(mine: str, theirs: str) -> str:
    """The digest that two peers take: the stronger wish; none where one side's memory can't be read or both say off."""
    if not (mine in DIGESTS and theirs in DIGESTS):
        return ""
    found = max(mine, theirs, key=DIGESTS.index)
    return "" if found == "off" else found
