"""What a book may forget, and what it tells its peers so that they may.

A record goes when everyone that could still speak of it knows its end, or is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.proto import rules
from kvferry.proto.claim import Claim
from kvferry.proto.effects import Forget, Kind
from kvferry.proto.joining import unpark
from kvferry.proto.offer import Offer
from kvferry.proto.rules import PeerState

if TYPE_CHECKING:
    from kvferry.proto.book import Book
    from kvferry.proto.peer import Peer


def low_claim(book: Book, peer: Peer) -> int:
    """Every claim below this number is over as far as the peer is concerned."""
    looking = (claim.id for claim in book.claims.values() if claim.looking)
    return min([book.next_claim, *peer.claims, *looking])


def quiet_below(book: Book, peer: Peer) -> int:
    """Nothing of this process's writes over links of the peer's process with a lower epoch can land any more."""
    busy = [link.peer.epoch for link in book.jobs.values() if link.peer.incarnation == peer.id.incarnation]
    return min([peer.id.epoch, *busy])


def unproven_before(book: Book, peer: Peer) -> bool:
    """Whether pages wait for a proof about an earlier epoch of the peer's process."""
    return any(
        other.id.incarnation == peer.id.incarnation and other.state is PeerState.LOST and other.claims
        for other in book.peers.values()
    )


def forget_links(book: Book, peer: Peer) -> None:
    """Forget the claims of a peer that are over, or all of them once it is lost."""
    lost = peer.state in {PeerState.LOST, PeerState.GONE}
    for key, link in list(book.links.items()):
        if link.peer != peer.id or link.jobs or (link.offer and link.offer.state in rules.LIVE_OFFERS):
            continue
        over = link.info.claim < peer.low_claim or (rules.PRUNE_UNACKED and link.over)
        if lost or over:
            unpark(book, link)
            del book.links[key]
            peer.links -= 1


def forget_peer(book: Book, peer: Peer) -> None:
    """Forget a lost peer that nothing refers to."""
    gone = peer.state in {PeerState.LOST, PeerState.GONE}
    if gone and not peer.claims and not peer.links:
        del book.peers[peer.id]


def forget_claim(book: Book, claim: Claim) -> None:
    """Forget a claim once it is settled, cleared, and its sources know."""
    if claim.looking and book.now - claim.opened_at < book.times.bootstrap_timeout_s:
        return  # its sources are still to hear that it has failed
    if claim.cleared and claim.state in rules.SETTLED and all(view.settled for view in claim.views.values()):
        for peer in claim.views:
            book.peers[peer].claims.discard(claim.id)
        del book.claims[claim.id]
        book.show()
        book.emit(Forget(Kind.CLAIM, claim.id))


def forget_offer(book: Book, offer: Offer) -> None:
    """Forget an offer once it is settled, cleared, and none of its claims is remembered."""
    known = any(book.links.get((link.peer, link.info.claim)) is link for link in offer.links)
    if offer.cleared and offer.state in rules.SETTLED and not known:
        del book.offers[offer.id]
        book.show()
        book.emit(Forget(Kind.OFFER, offer.id))
