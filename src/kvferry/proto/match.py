"""What an offer and a claim must agree on, wherever both sides know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.errors import InputError
from kvferry.proto import rules
from kvferry.proto.effects import OfferFacts
from kvferry.wire import InfoPhase, TransferInfo

if TYPE_CHECKING:
    from kvferry.proto.offer import Link, Offer


def difference(offer: Offer, link: Link) -> str:
    """Why the claim of `link` can't be served by `offer`, with both values; "" if nothing known differs."""
    for name in rules.MATCHED:
        text = COMPARISONS[name](offer, link)
        if text:
            return text
    return ""


def end_tokens(facts: OfferFacts, info: TransferInfo) -> int:
    """The token after the last one to copy: the claim's number, else the offer's whole pages."""
    if info.num_tokens is not None:
        return info.num_tokens
    return facts.end_tokens


def _tag(offer: Offer, link: Link) -> str:
    mine, theirs = offer.tag, link.info.tag
    if mine and theirs and mine != theirs:
        return f"request tag {theirs:#x} of decode is not {mine:#x} of prefill: another request's room"
    return ""


def _fan_in(offer: Offer, link: Link) -> str:
    known = [other.info.fan_in for other in offer.links if other is not link]
    if known and known[0] != link.info.fan_in:
        return f"this claim says {link.info.fan_in} claims share the offer, an earlier one said {known[0]}"
    if len(known) >= link.info.fan_in:
        return f"all {link.info.fan_in} claims of the offer are there already"
    return ""


def _tokens(offer: Offer, link: Link) -> str:
    facts, info = offer.facts, link.info
    if facts is None or info.phase is not InfoPhase.PAGES:
        return ""
    if info.prefix_tokens < facts.first_token:
        return f"decode wants tokens from {info.prefix_tokens} on, prefill begins at {facts.first_token}"
    if info.num_tokens is None:
        return ""
    if facts.num_tokens is not None and facts.num_tokens != info.num_tokens:
        return f"decode expects {info.num_tokens} tokens, prefill holds {facts.num_tokens}"
    if facts.page_tokens and info.num_tokens > facts.end_tokens:
        end = facts.end_tokens
        return f"decode expects {info.num_tokens} tokens, prefill's {facts.num_pages} pages end at {end}"
    return ""


def _bytes(offer: Offer, link: Link) -> str:
    facts, info = offer.facts, link.info
    if facts is None or info.phase is not InfoPhase.PAGES:
        return ""
    try:
        mine = link.own_bytes(facts)
    except InputError as error:
        return f"the claim's numbers make no request: {error}"
    if info.expected_bytes is not None and mine != info.expected_bytes:
        return f"decode expects {info.expected_bytes} bytes from this rank, prefill's pages and layout give {mine}"
    return ""


COMPARISONS: dict[str, Callable[[Offer, Link], str]] = {
    "tag": _tag,
    "fan_in": _fan_in,
    "tokens": _tokens,
    "bytes": _bytes,
}
"""By the names in rules.MATCHED."""
