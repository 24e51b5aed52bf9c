"""What an offer and a claim must agree on: each difference refuses, with both numbers in the text."""

import pytest

from kvferry.errors import Code
from kvferry.ids import KVPoll
from kvferry.proto import rules
from kvferry.proto.effects import ClaimFacts, Kind, OfferFacts, Submit
from kvferry.proto.match import COMPARISONS
from kvferry.wire import InfoPhase, TransferInfo


def refusal(net, prefill, decode, offer, claim, *, pages=2):
    """The cause that a claim was refused with; "" if it was taken."""
    prefill.open_offer(**offer)
    number = decode.open_claim([prefill])
    decode.place(number, pages=pages, **claim)
    net.deliver()
    reason = decode.claimed(number).reason
    assert reason is None or reason.code is Code.REFUSED
    return without_hint(reason.cause) if reason else ""


def without_hint(cause):
    """The difference alone; what to do about it follows in every refusal."""
    text, _, hint = cause.partition("; ")
    assert hint == "both sides must mean the same request: its pages, tokens, prefix and tag"
    return text


def test_each_rule_of_agreement_has_its_comparison():
    assert tuple(COMPARISONS) == rules.MATCHED


def test_another_tag_is_refused_and_the_offer_waits_on_for_its_own_claim(net, prefill, decode):
    cause = refusal(net, prefill, decode, {"tag": 0xA}, {"tag": 0xB})
    assert cause == "request tag 0xb of decode is not 0xa of prefill: another request's room"
    assert prefill.offered(1).poll is KVPoll.Bootstrapping
    net.wait(6)
    assert f"the last one refused: {cause}" in prefill.offered(1).reason.cause


@pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (0, 5), (5, 0), (5, 5)])
def test_a_tag_that_one_side_does_not_know_is_no_difference(net, prefill, decode, mine, theirs):
    assert refusal(net, prefill, decode, {"tag": mine}, {"tag": theirs}) == ""
    assert prefill.book.counts["untagged"] == 1  # joined at OPEN, when the claim knew no tag


def test_only_joins_without_a_tag_on_both_sides_are_counted_as_untagged(net, prefill, decode):
    prefill.open_offer(tag=5)
    decode.open_claim([prefill], tag=5)
    net.deliver()
    assert prefill.book.counts["untagged"] == 0


def test_another_number_of_tokens_is_refused(net, prefill, decode):
    cause = refusal(net, prefill, decode, {"num_tokens": 7}, {"num_tokens": 8})
    assert cause == "decode expects 8 tokens, prefill holds 7"


@pytest.mark.parametrize(("mine", "theirs"), [(7, 7), (None, 7), (None, 8), (None, None)])
def test_numbers_of_tokens_that_agree_or_are_not_known_are_taken(net, prefill, decode, mine, theirs):
    assert refusal(net, prefill, decode, {"num_tokens": mine}, {"num_tokens": theirs}) == ""


def test_more_tokens_than_the_pages_hold_are_refused(net, prefill, decode):
    cause = refusal(net, prefill, decode, {}, {"num_tokens": 9})
    assert cause == "decode expects 9 tokens, prefill's 2 pages end at 8"


def test_where_a_rank_holds_a_share_of_the_tokens_its_pages_say_nothing_of_the_end(net, prefill, decode):
    assert refusal(net, prefill, decode, {"page_tokens": 0}, {"num_tokens": 9}) == ""
    assert prefill.offered(1).facts.end_tokens == 0


def test_a_prefix_below_the_offers_first_token_is_refused(net, prefill, decode):
    cause = refusal(net, prefill, decode, {"first_token": 4}, {"prefix_tokens": 3, "num_tokens": 8})
    assert cause == "decode wants tokens from 3 on, prefill begins at 4"


def test_a_prefix_above_the_offers_first_token_is_skipped(net, prefill, decode):
    assert refusal(net, prefill, decode, {"first_token": 0}, {"prefix_tokens": 4, "num_tokens": 8}, pages=1) == ""
    prefill.chunk(1)
    [submit] = prefill.took(Submit)
    assert (submit.first_token, submit.info.prefix_tokens, submit.end_tokens) == (0, 4, 8)


def test_another_number_of_bytes_is_refused_with_both_numbers(net, prefill, decode):
    cause = refusal(net, prefill, decode, {}, {}, pages=3)
    assert cause == "decode expects 12 bytes from this rank, prefill's pages and layout give 8"


def test_state_rows_count_on_both_sides(net, prefill, decode):
    assert refusal(net, prefill, decode, {}, {"rows": {"state": 1}}) == ""


def test_numbers_that_make_no_request_are_refused_not_raised(net, prefill, decode):
    prefill.open_offer()
    info = TransferInfo(7, 1, 1, InfoPhase.PAGES, prefix_tokens=9, num_tokens=8, expected_bytes=5)
    prefill.receive(prefill.peer(decode), info)
    [status] = [flight.message for flight in net.lose()]
    assert status.reason.cause.startswith("the claim's numbers make no request: prefix_tokens 9, num_tokens 8")


def test_bytes_that_the_claim_does_not_know_are_no_difference(net, prefill, decode):
    prefill.open_offer()
    prefill.receive(prefill.peer(decode), TransferInfo(7, 1, 1, InfoPhase.PAGES))
    assert len(prefill.offered(1).links) == 1


def test_claims_that_disagree_on_how_many_they_are_are_refused(net, prefill, decode):
    other = net.end("decode", 2002)
    net.join(prefill, other)
    prefill.open_offer()
    decode.open_claim([prefill], fan_in=2)
    net.deliver()
    number = other.open_claim([prefill], fan_in=3)
    net.deliver()
    cause = "this claim says 3 claims share the offer, an earlier one said 2"
    assert without_hint(other.claimed(number).reason.cause) == cause


def test_more_claims_than_they_say_are_refused(net, prefill, decode):
    other = net.end("decode", 2002)
    net.join(prefill, other)
    prefill.open_offer()
    decode.open_claim([prefill])
    net.deliver()
    number = other.open_claim([prefill])
    net.deliver()
    assert without_hint(other.claimed(number).reason.cause) == "all 1 claims of the offer are there already"


def test_with_equal_tags_a_difference_fails_the_offer_at_once_on_both_sides(net, prefill, decode):
    number = prefill.open_offer(tag=5, num_tokens=7)
    claim = decode.open_claim([prefill], tag=5)
    decode.place(claim, num_tokens=8, tag=5)
    net.deliver()
    assert without_hint(prefill.offered(number).reason.cause) == "decode expects 8 tokens, prefill holds 7"
    assert decode.claimed(claim).reason == prefill.offered(number).reason


def test_claims_that_joined_before_init_are_checked_when_it_says_more(net, prefill, decode):
    number = prefill.open_offer(pages=None)
    claim = decode.open_claim([prefill], tag=5)
    net.deliver()
    prefill.init_offer(number, OfferFacts(2, 4, tag=6))
    net.deliver()
    assert decode.claimed(claim).reason.cause.startswith("request tag 0x5 of decode is not 0x6")
    assert prefill.offered(number).links == []


def test_the_end_of_an_offer_is_the_end_of_its_last_page():
    assert OfferFacts(num_pages=3, page_tokens=4, first_token=6).end_tokens == 16
    assert OfferFacts(num_pages=0, page_tokens=4, first_token=6).end_tokens == 6
    assert OfferFacts(num_pages=3, page_tokens=0, num_tokens=9).end_tokens == 9


@pytest.mark.parametrize(("prefix", "num_tokens", "end"), [(0, None, 12), (5, None, 16), (0, 10, 10), (4, None, 16)])
def test_the_end_of_a_claim_is_its_number_of_tokens_or_of_its_whole_pages(prefix, num_tokens, end):
    assert ClaimFacts({}, 4, 3, prefix, num_tokens).end_tokens == end


def test_a_claim_without_pages_ends_at_its_prefix():
    assert ClaimFacts({}, 4, 0, prefix_tokens=5).end_tokens == 5


def test_an_aborted_offer_with_a_refused_claim_keeps_its_own_reason(net, prefill, decode):
    refusal(net, prefill, decode, {"tag": 1}, {"tag": 2})
    prefill.abort(Kind.OFFER, 1)
    assert prefill.offered(1).reason.cause == "the client went away"
