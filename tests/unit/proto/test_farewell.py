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


def test_an_offer_that_nobody_claimed_names_the_peer_that_was_refused_at_the_handshake(net, prefill):
    offer = prefill.open_offer()
    prefill.book.refused_peer = "incompatible: dtype: prefill has 'float16', decode has 'bfloat16'"
    net.wait(7.0)
    assert prefill.offered(offer).reason.cause.endswith(
        "the last peer refused at the handshake: incompatible: dtype: prefill has 'float16', decode has 'bfloat16'"
    )


@pytest.mark.parametrize("aux", [b"", b"row"])
def test_a_claim_that_wants_a_metadata_row_does_not_succeed_without_one(net, prefill, decode, aux):
    offer = prefill.open_offer()
    number = decode.open_claim([prefill])
    decode.place(number, wants_aux=True)
    prefill.chunk(offer, aux=aux)
    net.deliver()
    for job in prefill.jobs():
        prefill.job_landed(job, 8)
    net.deliver()
    claim = decode.claimed(number)
    assert claim.poll is (KVPoll.Success if aux else KVPoll.Failed)
    if not aux:
        assert claim.reason.cause == "decode wants a metadata row, prefill sent none; pass aux_index on both sides"
        assert claim.released


def test_texts_call_a_peer_by_its_name(net, prefill, decode):
    peer = decode.peer(prefill, 9)
    assert decode.book.named(peer) == str(peer)
    decode.peer_ready(peer, decode.source(prefill).size, "prefill dp0 pp0 cp0 tp1 at tcp://10.0.0.1:5000")
    assert decode.book.named(peer) == "prefill dp0 pp0 cp0 tp1 at tcp://10.0.0.1:5000"
