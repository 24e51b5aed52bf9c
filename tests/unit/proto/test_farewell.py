"""A claim that failed before its sources were known still tells them, and a retry is not hit by the first attempt."""

import pytest

from kvferry.errors import Code, Reason
from kvferry.ids import KVPoll
from kvferry.proto.effects import Forget, Kind
from kvferry.proto.rules import OfferState
from kvferry.wire import InfoPhase, StatusPhase, TransferInfo, TransferStatus


def test_a_claim_aborted_while_its_sources_are_looked_for_is_closed_at_them(net, prefill, decode):
    offer = prefill.open_offer(tag=5)
    number = decode.claim(7, tag=5)
    decode.place(number)
    decode.abort(Kind.CLAIM, number, "the client went away")
    decode.clear(Kind.CLAIM, number)
    assert decode.claimed(number).released
    assert decode.sent(TransferInfo) == []
    decode.resolved(number, [decode.source(prefill)])
    (info,) = decode.sent(TransferInfo)
    assert (info.phase, info.pages, info.reason.cause) == (InfoPhase.CLOSED, {}, "the client went away")
    net.deliver()
    assert prefill.offered(offer).reason.cause == "the client went away"
    assert prefill.offered(offer).poll is KVPoll.Failed
    net.wait(5.0)
    assert number not in decode.book.claims
    assert decode.took(Forget)


def test_such_a_claim_is_forgotten_when_its_sources_are_never_found(net, prefill, decode):
    number = decode.claim(7)
    decode.abort(Kind.CLAIM, number)
    decode.clear(Kind.CLAIM, number)
    net.wait(7.5)
    assert number in decode.book.claims
    net.wait(1.0)
    assert decode.book.idle
    decode.resolved(number, [decode.source(prefill)])
    decode.unresolved(number, Reason(Code.UNREACHABLE))
    assert decode.sent(TransferInfo) == []


def test_a_claim_that_can_not_be_resolved_fails_with_that_reason_and_goes(net, prefill, decode):
    number = decode.claim(7)
    decode.unresolved(number, Reason(Code.UNREACHABLE, cause="refused"))
    assert decode.claimed(number).reason.cause == "refused"
    decode.resolved(number, [decode.source(prefill)])
    assert decode.sent(TransferInfo) == []
    decode.clear(Kind.CLAIM, number)
    net.wait(0.5)
    assert decode.book.idle


@pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (5, 0), (0, 5), (5, 6)])
def test_a_close_that_comes_first_does_not_fail_what_may_be_another_request(net, prefill, decode, mine, theirs):
    offer = prefill.open_offer(tag=mine)
    number = decode.claim(7, tag=theirs)
    decode.abort(Kind.CLAIM, number)
    decode.resolved(number, [decode.source(prefill)])
    net.deliver()
    assert prefill.offered(offer).state is OfferState.WAITING
    assert prefill.sent(TransferStatus)[-1].phase is StatusPhase.FAILED


def test_a_retry_is_not_refused_by_the_tombstone_that_refused_the_first_attempt(net, prefill, decode):
    offer = prefill.open_offer(tag=9)
    prefill.abort(Kind.OFFER, offer, "client left")
    prefill.clear(Kind.OFFER, offer)
    first = decode.open_claim([prefill], tag=9)
    net.deliver()
    assert decode.claimed(first).reason.cause == "client left"
    decode.clear(Kind.CLAIM, first)
    second = decode.open_claim([prefill], tag=9)
    decode.place(second)
    net.deliver()
    again = prefill.open_offer(tag=9)
    prefill.chunk(again)
    net.deliver()
    for job in prefill.jobs():
        prefill.job_landed(job, 8)
    net.deliver()
    assert decode.claimed(second).poll is KVPoll.Success
