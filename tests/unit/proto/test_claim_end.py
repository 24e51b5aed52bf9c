"""A claim's way to quiet, and the clocks that run in it."""

import pytest

from kvferry.errors import Code
from kvferry.ids import KVPoll
from kvferry.proto.effects import Fence, Kind, Release
from kvferry.proto.rules import ClaimEvent, ClaimState
from kvferry.wire import StatusPhase, TransferStatus

# -- quiet


def test_a_quiet_bit_counts_only_where_nothing_more_will_be_posted(decode, alone, aborted):
    number, say = alone
    say(StatusPhase.QUEUED, quiet=True)
    say(StatusPhase.SENDING, quiet=True, chunks_total=1, chunks_landed=1)
    decode.fail(Kind.CLAIM, number, aborted)
    assert decode.claimed(number).state is ClaimState.DRAINING
    say(StatusPhase.SENDING, quiet=True, chunks_total=1, chunks_landed=1)
    assert decode.took(Release) == []
    say(StatusPhase.FAILED, quiet=True, reason=aborted)
    assert decode.took(Release) == [Release(Kind.CLAIM, number)]


def test_a_quiet_bit_seen_before_the_claim_failed_is_kept(net, prefill, decode, aborted):
    other = net.end("prefill", 1002)
    net.join(other, decode)
    claim = decode.open_claim([prefill, other])
    decode.place(claim)
    decode.receive(decode.peer(prefill), TransferStatus(7, claim, 1, StatusPhase.DELIVERED, bytes_landed=8, quiet=True))
    decode.fail(Kind.CLAIM, claim, aborted)
    assert decode.took(Release) == []
    decode.receive(decode.peer(other), TransferStatus(7, claim, 1, StatusPhase.FAILED, quiet=True))
    assert decode.took(Release) == [Release(Kind.CLAIM, claim)]


def test_a_failure_that_is_not_quiet_yet_waits(decode, alone, aborted):
    number, say = alone
    say(StatusPhase.FAILED, reason=aborted, quiet=False)
    assert decode.claimed(number).state is ClaimState.DRAINING
    say(StatusPhase.FAILED, reason=aborted, quiet=True)
    assert decode.claimed(number).state is ClaimState.QUIET


@pytest.mark.row(ClaimState.DRAINING, ClaimEvent.DRAIN_LIMIT)
@pytest.mark.row(ClaimState.QUARANTINED, ClaimEvent.DRAINED)
def test_pages_without_a_proof_are_quarantined_at_the_drain_limit_and_a_fence_brings_them_back(
    net, prefill, decode, alone, aborted
):
    number, _ = alone
    decode.fail(Kind.CLAIM, number, aborted)
    net.wait(4.75, deliver=False)
    assert decode.claimed(number).state is ClaimState.DRAINING
    net.wait(0.25, deliver=False)
    assert decode.claimed(number).state is ClaimState.QUARANTINED
    assert decode.book.counts["quarantined"] == 1
    assert decode.took(Fence) == [Fence(decode.peer(prefill), number)]
    net.wait(30, deliver=False)
    assert decode.took(Release) == []
    decode.fence_done(decode.peer(prefill), number)
    assert decode.claimed(number).state is ClaimState.QUIET
    assert decode.took(Release) == [Release(Kind.CLAIM, number)]


def test_only_sources_that_are_not_quiet_are_fenced(net, prefill, decode, aborted):
    other = net.end("prefill", 1002)
    net.join(other, decode)
    claim = decode.open_claim([prefill, other])
    decode.place(claim)
    decode.fail(Kind.CLAIM, claim, aborted)
    decode.receive(decode.peer(prefill), TransferStatus(7, claim, 1, StatusPhase.FAILED, quiet=True))
    net.wait(5, deliver=False)
    assert decode.took(Fence) == [Fence(decode.peer(other), claim)]


@pytest.mark.row(ClaimState.QUARANTINED, ClaimEvent.STATUS)
def test_a_quarantined_claim_still_listens(net, decode, alone, aborted):
    number, say = alone
    decode.fail(Kind.CLAIM, number, aborted)
    net.wait(6, deliver=False)
    say(StatusPhase.FAILED, quiet=False)
    assert decode.claimed(number).state is ClaimState.QUARANTINED
    say(StatusPhase.FAILED, quiet=True)
    assert decode.took(Release) == [Release(Kind.CLAIM, number)]


def test_an_operator_can_release_a_quarantined_claim_once(net, prefill, decode, alone, aborted):
    number, _ = alone
    decode.fail(Kind.CLAIM, number, aborted)
    net.wait(6, deliver=False)
    decode.operator_release(Kind.CLAIM, number)
    assert decode.took(Release) == [Release(Kind.CLAIM, number)]
    decode.operator_release(Kind.CLAIM, number)
    decode.fence_done(decode.peer(prefill), number)
    assert decode.took(Release) == [Release(Kind.CLAIM, number)]


def test_an_operator_can_not_release_what_may_still_succeed(decode, alone, aborted):
    number, _ = alone
    decode.operator_release(Kind.CLAIM, number)
    decode.fail(Kind.CLAIM, number, aborted)
    assert decode.took(Release) == []


def test_a_fence_that_nobody_waits_for_changes_nothing(net, prefill, decode, alone):
    number, _ = alone
    before = len(decode.effects)
    decode.fence_done(decode.peer(prefill), 99)
    decode.fence_done(decode.peer(decode), number)
    assert decode.effects[before:] == []


# -- deadlines


def test_a_claim_that_no_source_accepts_fails_after_the_bootstrap_timeout(net, prefill, decode):
    number = decode.open_claim([prefill])
    net.wait(7.75)
    assert decode.claimed(number).poll is KVPoll.Bootstrapping
    net.wait(0.25)
    reason = decode.claimed(number).reason
    assert (reason.code, reason.stage) == (Code.BOOTSTRAP_TIMEOUT, "handshake of the room")
    assert reason.cause == "1 of 1 sources did not accept the room within 8 s"
    assert reason.peer == str(decode.peer(prefill))


def test_the_bootstrap_timeout_runs_on_after_the_pages_were_named(net, prefill, decode):
    number = decode.open_claim([prefill])
    decode.place(number)
    net.wait(8)
    assert decode.claimed(number).reason.code is Code.BOOTSTRAP_TIMEOUT


def test_a_claim_whose_sources_are_not_found_says_so(net, decode):
    number = decode.claim(7)
    net.wait(8)
    assert decode.claimed(number).reason.cause == "the prefill side's ranks were not reached within 8 s"


def test_a_claim_whose_sources_are_not_found_says_what_it_waits_for(net, decode):
    decode.book.looks_for = lambda number: f"what {number} waits for"
    number = decode.claim(7)
    net.wait(8)
    cause = decode.claimed(number).reason.cause
    assert cause == f"the prefill side's ranks were not reached within 8 s: what {number} waits for"


def test_a_claim_waits_for_a_queued_source_as_long_as_it_takes(net, prefill, decode, alone):
    number, say = alone
    say(StatusPhase.QUEUED)
    net.wait(1000, deliver=False)
    assert decode.claimed(number).poll is KVPoll.Transferring


def test_the_hold_limit_ends_the_waiting_where_it_is_set(net, prefill):
    decode = net.end("decode", 2001, hold_limit_s=20.0)
    net.join(prefill, decode)
    prefill.open_offer()
    number = decode.open_claim([prefill])
    net.wait(30)
    decode.place(number)
    net.wait(19.75)
    assert decode.claimed(number).poll is KVPoll.Transferring
    net.wait(0.25)
    reason = decode.claimed(number).reason
    assert (reason.code, reason.stage) == (Code.HOLD_LIMIT, "waiting for the source")
    assert reason.cause == "pages were held for 20 s (hold_limit_s)"


def test_a_claim_stalls_when_its_source_has_writes_out_and_no_news(net, prefill, decode, alone):
    number, say = alone
    say(StatusPhase.SENDING, chunks_total=2, chunks_landed=1, bytes_landed=4)
    net.wait(2.75, deliver=False)
    assert decode.claimed(number).poll is KVPoll.Transferring
    net.wait(0.25, deliver=False)
    reason = decode.claimed(number).reason
    assert (reason.code, reason.stage, reason.peer) == (Code.STALLED, "transfer", str(decode.peer(prefill)))
    assert reason.cause == "no progress for 3 s, 4 bytes landed before"


def test_a_claim_does_not_stall_while_its_source_computes_between_chunks(net, decode, alone):
    number, say = alone
    say(StatusPhase.SENDING, chunks_total=1, chunks_landed=1, bytes_landed=0)
    net.wait(100, deliver=False)
    say(StatusPhase.SENDING, chunks_total=3, chunks_landed=2, bytes_landed=0)
    net.wait(2.75, deliver=False)
    assert decode.claimed(number).poll is KVPoll.Transferring


def test_the_bootstrap_timeout_counts_from_the_opening_not_from_the_last_tick(net, decode):
    net.now += 50
    number = decode.claim(7)
    net.wait(7.75)
    assert decode.claimed(number).poll is KVPoll.Bootstrapping
