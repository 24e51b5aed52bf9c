"""The clocks that run in an offer: the claim deadline and the stall limit."""

from kvferry.errors import Code
from kvferry.ids import KVPoll
from kvferry.proto.effects import Kind
from kvferry.proto.rules import OfferState
from kvferry.wire import StatusPhase, TransferStatus


def test_an_offer_waits_for_its_claims_no_longer_than_the_claim_timeout(net, prefill):
    number = prefill.open_offer()
    net.wait(5.75)
    assert prefill.offered(number).poll is KVPoll.Bootstrapping
    net.wait(0.25)
    reason = prefill.offered(number).reason
    assert (reason.code, reason.stage) == (Code.NO_CLAIM, "waiting for claims")
    assert reason.cause == "0 of an unknown number of claims came within 6 s"


def test_the_claim_deadline_runs_on_while_an_earlier_claim_is_served(net, prefill, decode):
    number = prefill.open_offer()
    decode.place(decode.open_claim([prefill], fan_in=2))
    net.deliver()
    prefill.chunk(number)
    for _ in range(6):
        prefill.job_progress(prefill.jobs()[0])
        net.wait(1)
    reason = prefill.offered(number).reason
    assert reason.code is Code.NO_CLAIM
    assert reason.cause.startswith("1 of 2 claims came")


def test_a_link_that_was_delivered_stays_so_when_the_offer_fails_for_another(net, prefill, decode):
    number = prefill.open_offer()
    claim = decode.open_claim([prefill], fan_in=2)
    decode.place(claim)
    net.deliver()
    prefill.chunk(number)
    prefill.job_landed(prefill.jobs()[0], 8)
    net.wait(6)
    assert prefill.offered(number).poll is KVPoll.Failed
    assert decode.claimed(claim).poll is KVPoll.Success
    [link] = prefill.offered(number).links
    assert link.phase is StatusPhase.DELIVERED


def test_an_offer_stalls_when_nothing_lands_while_writes_are_out(net, prefill, decode, room):
    number, _, job = room
    net.wait(2)
    prefill.job_progress(job)
    net.wait(2.75)
    assert prefill.offered(number).poll is KVPoll.Transferring
    net.wait(0.25)
    reason = prefill.offered(number).reason
    assert (reason.code, reason.stage, reason.peer) == (Code.STALLED, "transfer", str(prefill.peer(decode)))
    assert reason.cause == "no byte landed for 3 s, 0 bytes landed before"


def test_an_offer_does_not_stall_while_it_computes_between_chunks(net, prefill, decode):
    number = prefill.open_offer(pages=4)
    claim = decode.open_claim([prefill])
    decode.place(claim, pages=4)
    net.deliver()
    prefill.chunk(number, 0, last=False)
    prefill.job_landed(prefill.jobs()[0], 8)
    net.wait(60)
    prefill.chunk(number, 1)
    net.wait(1)
    prefill.job_landed(prefill.jobs()[1], 8)
    net.deliver()
    assert prefill.offered(number).poll is KVPoll.Success
    assert decode.claimed(claim).poll is KVPoll.Success


def test_a_completion_in_the_same_moment_comes_before_the_deadline(net, prefill, decode, room):
    number, _, job = room
    net.wait(2.75)
    net.now += 0.25
    prefill.job_landed(job, 8)
    prefill.on_tick()
    assert prefill.offered(number).poll is KVPoll.Success


def test_an_offer_that_failed_has_no_claim_deadline_and_no_stall(net, prefill, decode, room, aborted):
    number, _, _ = room
    prefill.fail(Kind.OFFER, number, aborted)
    net.wait(4)
    assert prefill.offered(number).reason == aborted


def test_a_chunk_that_takes_longer_than_the_stall_limit_goes_on_at_both_ends_while_bytes_land(
    net, prefill, decode, room
):
    number, claim, job = room
    before = len(prefill.sent(TransferStatus))
    for _ in range(80):
        prefill.job_progress(job)
        net.wait(0.25)
    assert prefill.offered(number).poll is KVPoll.Transferring
    assert decode.claimed(claim).poll is KVPoll.Transferring
    assert 15 <= len(prefill.sent(TransferStatus)) - before <= 25  # one per heartbeat, in 20 s
    prefill.job_landed(job, 8)
    net.deliver()
    assert decode.claimed(claim).poll is KVPoll.Success


def test_the_claim_deadline_counts_from_the_opening_not_from_the_last_tick(net, prefill):
    net.now += 50
    number = prefill.open_offer()
    net.wait(5.75)
    assert prefill.offered(number).poll is KVPoll.Bootstrapping


def test_the_drain_limit_counts_from_the_failure_not_from_the_last_tick(net, prefill, decode, room, aborted):
    number, _, _ = room
    net.now += 50
    prefill.fail(Kind.OFFER, number, aborted)
    net.wait(4.75, deliver=False)
    assert prefill.offered(number).state is OfferState.DRAINING
