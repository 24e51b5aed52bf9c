"""How a claim finds its offer: by the room number, once. Claims that come early wait; a refusal is remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import Code
from kvferry.proto import rules
from kvferry.proto.effects import Kind
from kvferry.proto.offer import Link, Offer
from kvferry.proto.rules import OFFER, OfferEvent, fire
from kvferry.wire import InfoPhase, TransferInfo

if TYPE_CHECKING:
    from kvferry.proto.book import Book
    from kvferry.proto.peer import Peer


def hear(book: Book, record: Peer, info: TransferInfo) -> None:
    """Take a snapshot of a claim."""
    key = (record.id, info.claim)
    link = book.links.get(key)
    if info.claim < record.low_claim:
        book.counts["late"] += 1
        return
    if link is None:
        if info.phase is InfoPhase.CLOSED and not rules.REMEMBER_CLOSED:
            return
        if record.links >= rules.LINKS_PER_PEER:
            book.counts["over the limit"] += 1
            return
        link = book.links[key] = Link(book, record.id, info)
        record.links += 1
    if info.room != link.info.room:
        book.counts["foreign"] += 1
        return
    if not link.talk.hear(info.rev, info.ack, info.want_ack):
        return
    if link.info.phase is InfoPhase.OPEN and info.phase is not InfoPhase.CLOSED:
        link.info = info  # once pages were named they stay: writes go by what was checked then
    _follow(book, link, info)


def join(book: Book, offer: Offer, link: Link) -> None:
    """Take a claim into an offer, unless its process has one there already."""
    unpark(book, link)
    if any(other.peer == link.peer for other in offer.links):
        cause = "an earlier claim of the same process is in this offer already"
        link.refuse(book.where.reason(Code.REFUSED, cause, peer=book.named(link.peer)))
        return
    if not (offer.tag and link.info.tag):
        book.counts["untagged"] += 1
    book.late(fire(OFFER, offer, OfferEvent.JOIN, link))
    offer.consider()


def unpark(book: Book, link: Link) -> None:
    """The claim does not wait for an offer any more."""
    parked = book.parked.get(link.info.room, [])
    if link in parked:
        parked.remove(link)
        book.peers[link.peer].parked -= 1
    if not parked:
        book.parked.pop(link.info.room, None)


def _follow(book: Book, link: Link, info: TransferInfo) -> None:
    """Act on a newer snapshot of a claim."""
    if link.refused:
        return
    if info.phase is InfoPhase.CLOSED:
        _closed(book, link, info)
    elif link.offer is not None:
        if link.offer.state in rules.LIVE_OFFERS and link.offer.check(link):
            link.offer.pump()
            link.offer.consider()
    else:
        _find_offer(book, link)


def _closed(book: Book, link: Link, info: TransferInfo) -> None:
    reason = info.reason or book.where.reason(Code.ABORTED, "the claim was closed")
    offer = link.offer
    link.claim_success = info.success
    if offer is not None:
        book.changed(Kind.OFFER, offer)
    if offer is None:
        unpark(book, link)
        if rules.REMEMBER_CLOSED:
            link.refuse(reason)
        offer = book.offers.get(book.offer_of.get(info.room, 0))
        if offer is None or not info.tag or offer.tag != info.tag:
            return  # without a tag it may be the close of an earlier request with this room number
    if not info.success:
        offer.failing(reason)


def _find_offer(book: Book, link: Link) -> None:
    offer = book.offers.get(book.offer_of.get(link.info.room, 0))
    tomb = book.tombstones.get(link.info.room)
    if offer is not None and offer.state in rules.LIVE_OFFERS:
        join(book, offer, link)
    elif tomb is not None and link.peer not in tomb.peers and not _tags_differ(tomb.tag, link.info.tag):
        link.refuse(tomb.reason)
        book.tombstones[link.info.room] = tomb._replace(peers=tomb.peers | {link.peer})  # a retry is not refused by it
    elif link in book.parked.get(link.info.room, []):
        return
    elif book.peers[link.peer].parked >= rules.PARKED_PER_PEER:
        cause = f"{rules.PARKED_PER_PEER} claims of this peer wait for offers already"
        link.refuse(book.where.reason(Code.REFUSED, cause, peer=book.named(link.peer)))
    else:
        book.parked.setdefault(link.info.room, []).append(link)
        book.peers[link.peer].parked += 1


def _tags_differ(one: int, other: int) -> bool:
    return bool(one and other and one != other)
