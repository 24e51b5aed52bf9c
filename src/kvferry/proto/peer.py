"""What a book keeps of each peer, and the ticks by which two of them forget together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.ids import PeerId
from kvferry.proto import forgetting, rules
from kvferry.proto.effects import RouteSize
from kvferry.proto.rules import PeerState
from kvferry.wire import Tick

if TYPE_CHECKING:
    from kvferry.proto.book import Book


class Peer:
    """One registration epoch of another process.

    Attributes:
        id: the identity.
        name: what texts call it: side, rank and address.
        state: READY once both sides have registered; rules.PEER is the table.
        size: the route from here to the peer, as far as the protocol needs it.
        digest: "sample" or "full" where canaries are taken of what moves between the two; "" where not.
        claims: numbers of this side's claims that have a view of the peer.
        links: how many of the peer's claims are remembered.
        parked: how many of the peer's claims wait for an offer.
        low_claim: the peer's claims below this number are over.
    """

    def __init__(self, peer: PeerId, size: RouteSize, name: str = "", digest: str = "") -> None:
        self.id = peer
        self.name = name or str(peer)
        self.state = PeerState.SHAKING
        self.size = size
        self.digest = digest
        self.claims: set[int] = set()
        self.links = 0
        self.parked = 0
        self.low_claim = 0
        self.live_there = 0
        self.fenced = False
        self._seq_sent = 0
        self._seq_seen = 0
        self._low_sent = 0
        self._live_sent = 0
        self._owed = False
        self._tick_at = 0.0

    def expect_memory(self) -> None:
        """A claim was shown to the peer, so it remembers at least one."""
        self.live_there = max(1, self.live_there)

    def hear(self, tick: Tick) -> bool:
        """Take a tick; say whether it is news."""
        if tick.seq <= self._seq_seen:
            return False
        self._seq_seen = tick.seq
        self.low_claim = max(self.low_claim, tick.low_claim)
        self.live_there = tick.live_offers
        self._owed = self._owed or tick.want_ack
        return True

    def tick(self, book: Book, now: float) -> Tick | None:
        """The tick that is due now, if any."""
        if self.state is not PeerState.READY or now < self._tick_at:
            return None
        low, live = forgetting.low_claim(book, self), self.links
        # also of what is remembered here: the peer's last word on it may be lost, and this side's tick as well
        wants = self.live_there > 0 or live > 0 or forgetting.unproven_before(book, self)
        if not (wants or self._owed or low != self._low_sent or live != self._live_sent):
            return None
        self._seq_sent += 1
        self._low_sent, self._live_sent, self._owed = low, live, False
        self._tick_at = now + book.times.heartbeat_s
        return Tick(self._seq_sent, low, live, forgetting.quiet_below(book, self), wants)

    @property
    def may_speak(self) -> bool:
        """Whether its room messages are heard."""
        return self.state in rules.MAY_SPEAK
