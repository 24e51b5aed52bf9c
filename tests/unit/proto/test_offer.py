"""The sender's room: the rows of its table, and the rules that concern one offer."""

import pytest

from kvferry.errors import Code, ProtocolError
from kvferry.ids import KVPoll
from kvferry.proto.effects import Changed, Kind, OfferFacts, Release, Send, Stop, Submit
from kvferry.proto.rules import OfferEvent, OfferState
from kvferry.wire import InfoPhase, StatusPhase, TransferStatus

# -- WAITING


@pytest.mark.row(OfferState.WAITING, OfferEvent.INIT)
def test_init_says_how_much_will_be_sent_and_posts_what_was_sent_before(net, prefill, decode):
    number = prefill.open_offer(pages=None)
    prefill.chunk(number)
    decode.place(decode.open_claim([prefill]))
    net.deliver()
    assert prefill.jobs() == []
    prefill.init_offer(number, OfferFacts(num_pages=2, page_tokens=4))
    assert len(prefill.jobs()) == 1


@pytest.mark.row(OfferState.WAITING, OfferEvent.SEND)
def test_a_chunk_without_a_claim_is_kept_until_its_claim_names_pages(net, prefill, decode):
    number = prefill.open_offer()
    prefill.chunk(number)
    assert prefill.took(Submit) == []
    assert prefill.offered(number).poll is KVPoll.Bootstrapping
    claim = decode.open_claim([prefill])
    net.deliver()
    assert prefill.took(Submit) == []
    decode.place(claim)
    net.deliver()
    [submit] = prefill.took(Submit)
    assert submit.info.phase is InfoPhase.PAGES
    assert (submit.chunk.last, submit.first_token, submit.end_tokens) == (True, 0, 8)


@pytest.mark.row(OfferState.WAITING, OfferEvent.JOIN)
def test_a_claim_joins_a_waiting_offer_and_is_told_that_it_is_queued(net, prefill, decode):
    number = prefill.open_offer()
    claim = decode.open_claim([prefill])
    net.deliver()
    [status] = prefill.sent(TransferStatus)
    assert (status.phase, status.offer, status.claim) == (StatusPhase.QUEUED, number, claim)
    assert prefill.offered(number).poll is KVPoll.Bootstrapping
    decode.place(claim)
    net.deliver()
    assert prefill.offered(number).poll is KVPoll.WaitingForInput


@pytest.mark.row(OfferState.WAITING, OfferEvent.POST)
def test_the_first_chunk_posted_begins_the_sending(net, prefill, decode, room):
    number, _claim, _ = room
    assert prefill.offered(number).state is OfferState.SENDING
    assert prefill.offered(number).poll is KVPoll.Transferring
    assert prefill.sent(TransferStatus)[-1].phase is StatusPhase.QUEUED, "most rooms are over before it is worth saying"
    net.wait(3 * 0.25, deliver=False)
    assert prefill.sent(TransferStatus)[-1].phase is StatusPhase.SENDING


@pytest.mark.row(OfferState.WAITING, OfferEvent.COMPLETE)
def test_a_replica_that_was_not_elected_is_delivered_with_no_byte_at_the_last_send(net, prefill, decode):
    number = prefill.open_offer(pages=4)
    decode.place(decode.open_claim([prefill], elected=False), pages=4)
    net.deliver()
    prefill.chunk(number, 0, last=False)
    assert prefill.offered(number).state is OfferState.WAITING
    prefill.chunk(number, 1)
    assert prefill.offered(number).state is OfferState.DELIVERED
    assert prefill.took(Submit) == []
    last = prefill.sent(TransferStatus)[-1]
    assert (last.phase, last.bytes_landed) == (StatusPhase.DELIVERED, 0)
    assert len(prefill.took(Release)) == 1


def test_a_replica_that_was_not_elected_is_delivered_as_soon_as_its_last_chunk_is_ready(net, prefill, decode):
    number = prefill.open_offer()
    decode.place(decode.open_claim([prefill], elected=False))
    net.deliver()
    prefill.chunk(number, ready=False)
    assert prefill.offered(number).state is OfferState.WAITING
    prefill.chunk_ready(number, 0)
    assert prefill.offered(number).state is OfferState.DELIVERED


@pytest.mark.row(OfferState.WAITING, OfferEvent.FAIL)
@pytest.mark.row(OfferState.DRAINING, OfferEvent.DRAINED)
def test_an_offer_that_fails_with_nothing_out_is_quiet_at_once(net, prefill, decode):
    number = prefill.open_offer()
    claim = decode.open_claim([prefill])
    net.deliver()
    prefill.abort(Kind.OFFER, number)
    assert prefill.offered(number).state is OfferState.QUIET
    assert prefill.took(Release) == [Release(Kind.OFFER, number)]
    net.deliver()
    assert decode.claimed(claim).poll is KVPoll.Failed
    assert decode.claimed(claim).reason == prefill.offered(number).reason


# -- SENDING


@pytest.mark.row(OfferState.SENDING, OfferEvent.SEND)
@pytest.mark.row(OfferState.SENDING, OfferEvent.POST)
def test_further_chunks_are_posted_while_the_window_has_room(net, prefill, decode):
    number = prefill.open_offer(pages=4)
    decode.place(decode.open_claim([prefill]), pages=4)
    net.deliver()
    for chunk in range(3):
        prefill.chunk(number, chunk, pages=1, last=False)
    assert [submit.chunk.number for submit in prefill.took(Submit)] == [0, 1]
    prefill.job_landed(prefill.jobs()[0], 4)
    assert [submit.chunk.number for submit in prefill.took(Submit)] == [0, 1, 2]


@pytest.mark.row(OfferState.SENDING, OfferEvent.JOIN)
def test_each_claim_is_sent_as_soon_as_its_own_pages_are_known(net, prefill, decode):
    other = net.end("decode", 2002)
    net.join(prefill, other)
    number = prefill.open_offer()
    decode.place(decode.open_claim([prefill], fan_in=2))
    net.deliver()
    prefill.chunk(number)
    assert prefill.offered(number).state is OfferState.SENDING
    other.place(other.open_claim([prefill], fan_in=2))
    net.deliver()
    assert [submit.peer for submit in prefill.took(Submit)] == [prefill.peer(decode), prefill.peer(other)]
    first, second = prefill.jobs()
    prefill.job_landed(first, 8)
    net.deliver()
    assert decode.claimed(1).poll is KVPoll.Success
    assert prefill.offered(number).poll is KVPoll.Transferring
    prefill.job_landed(second, 8)
    assert prefill.offered(number).poll is KVPoll.Success


@pytest.mark.row(OfferState.SENDING, OfferEvent.LAND)
def test_what_landed_is_credited_and_told(net, prefill, decode):
    number = prefill.open_offer(pages=4)
    decode.place(decode.open_claim([prefill]), pages=4)
    net.deliver()
    prefill.chunk(number, 0, last=False)
    prefill.job_landed(prefill.jobs()[0], 8)
    net.wait(3 * 0.25, deliver=False)
    status = prefill.sent(TransferStatus)[-1]
    assert (status.phase, status.bytes_landed) == (StatusPhase.SENDING, 8)
    assert (status.chunks_landed, status.chunks_total) == (1, 1)
    assert prefill.offered(number).bytes_landed == 8
    net.deliver()
    assert decode.claimed(1).bytes_landed == 8


@pytest.mark.row(OfferState.SENDING, OfferEvent.COMPLETE)
def test_an_offer_is_delivered_when_all_links_are_and_releases_its_pages_once(net, prefill, decode, room):
    number, claim, job = room
    prefill.job_landed(job, 8)
    assert prefill.offered(number).poll is KVPoll.Success
    assert prefill.took(Release) == [Release(Kind.OFFER, number)]
    net.deliver()
    assert decode.claimed(claim).poll is KVPoll.Success
    late = prefill.book.counts["late"]
    prefill.abort(Kind.OFFER, number)
    prefill.job_landed(job, 8)
    net.wait(20)
    assert prefill.offered(number).poll is KVPoll.Success
    assert prefill.book.counts["late"] == late + 1
    assert prefill.took(Release) == [Release(Kind.OFFER, number)]


@pytest.mark.row(OfferState.SENDING, OfferEvent.FAIL)
@pytest.mark.row(OfferState.DRAINING, OfferEvent.LAND)
def test_an_offer_that_fails_with_writes_out_stops_them_and_keeps_its_pages_until_they_end(net, prefill, decode, room):
    number, claim, job = room
    prefill.abort(Kind.OFFER, number)
    assert prefill.took(Stop) == [Stop(job)]
    assert prefill.offered(number).poll is KVPoll.Failed
    assert prefill.offered(number).state is OfferState.DRAINING
    assert prefill.took(Release) == []
    assert prefill.sent(TransferStatus)[-1].quiet is False
    prefill.job_failed(job, "stopped", quiet=True)
    assert prefill.took(Release) == [Release(Kind.OFFER, number)]
    assert prefill.sent(TransferStatus)[-1].quiet is True
    net.deliver()
    assert decode.took(Release) == [Release(Kind.CLAIM, claim)]


# -- the end of a failed offer


@pytest.mark.row(OfferState.DRAINING, OfferEvent.DRAIN_LIMIT)
@pytest.mark.row(OfferState.QUARANTINED, OfferEvent.LAND)
@pytest.mark.row(OfferState.QUARANTINED, OfferEvent.DRAINED)
def test_a_write_without_a_proof_is_quarantined_at_the_drain_limit_and_released_when_it_is_quiet(
    net, prefill, decode, room
):
    number, _, job = room
    prefill.job_failed(job, "no answer", quiet=False)
    net.wait(4.5)
    assert prefill.offered(number).state is OfferState.DRAINING
    net.wait(1)
    assert prefill.offered(number).state is OfferState.QUARANTINED
    assert prefill.book.counts["quarantined"] == 1
    net.wait(30)
    assert prefill.took(Release) == []
    prefill.job_quiet(job)
    assert prefill.offered(number).state is OfferState.QUIET
    assert prefill.took(Release) == [Release(Kind.OFFER, number)]
    assert prefill.offered(number).poll is KVPoll.Failed


def test_a_failed_write_fails_the_offer_and_says_the_engines_words(net, prefill, decode, room):
    number, claim, job = room
    prefill.job_failed(job, "remote access error 10", quiet=True)
    reason = prefill.offered(number).reason
    assert (reason.code, reason.stage, reason.side) == (Code.WRITE_FAILED, "transfer", "prefill")
    assert reason.cause == "remote access error 10"
    assert reason.peer == str(prefill.peer(decode))
    net.deliver()
    assert decode.claimed(claim).reason == reason


def test_a_failed_write_is_not_landed(net, prefill, decode, room):
    number, _, job = room
    prefill.job_failed(job, "refused", quiet=True)
    status = prefill.sent(TransferStatus)[-1]
    assert (status.chunks_landed, status.bytes_landed, status.quiet) == (0, 0, True)
    assert prefill.offered(number).state is OfferState.QUIET


def test_an_unproven_failure_after_the_offer_failed_changes_nothing(prefill, decode, room, aborted):
    number, _, job = room
    prefill.fail(Kind.OFFER, number, aborted)
    prefill.job_failed(job, "no answer", quiet=False)
    assert prefill.offered(number).state is OfferState.DRAINING
    assert prefill.offered(number).reason == aborted


def test_the_first_cause_wins(net, prefill, decode, room, aborted):
    number, _claim, job = room
    prefill.fail(Kind.OFFER, number, aborted)
    prefill.job_failed(job, "stopped", quiet=True)
    prefill.abort(Kind.OFFER, number, "another cause")
    net.part(prefill, decode)
    assert prefill.offered(number).reason == aborted


def test_an_operator_can_release_a_quarantined_offer(net, prefill, decode, room):
    number, _, job = room
    prefill.job_failed(job, "no answer", quiet=False)
    net.wait(6)
    prefill.operator_release(Kind.OFFER, number)
    assert prefill.took(Release) == [Release(Kind.OFFER, number)]
    assert prefill.book.jobs == {}
    prefill.job_quiet(job)
    assert prefill.took(Release) == [Release(Kind.OFFER, number)]


def test_an_operator_can_not_release_what_is_still_sending(prefill, decode, room):
    number, _, job = room
    prefill.operator_release(Kind.OFFER, number)
    assert prefill.offered(number).state is OfferState.SENDING
    assert list(prefill.book.jobs) == [job]


# -- calls


def test_init_after_the_sending_began_is_a_mistake_of_the_caller(prefill, decode, room):
    number, _, _ = room
    with pytest.raises(ProtocolError, match="offer in state 'sending' has no event 'init'"):
        prefill.init_offer(number, OfferFacts(2, 4))


def test_send_to_a_failed_offer_is_late_and_ignored(prefill, decode):
    number = prefill.open_offer()
    prefill.abort(Kind.OFFER, number)
    late = prefill.book.counts["late"]
    prefill.chunk(number)
    assert prefill.book.counts["late"] == late + 1
    assert prefill.offered(number).chunks == []


def test_a_chunk_that_is_not_ready_is_posted_when_it_is(net, prefill, decode):
    number = prefill.open_offer(pages=4)
    decode.place(decode.open_claim([prefill]), pages=4)
    net.deliver()
    prefill.chunk(number, 0, last=False, ready=False)
    prefill.chunk(number, 1)
    assert prefill.jobs() == []
    prefill.chunk_ready(number, 0)
    assert [submit.chunk.number for submit in prefill.took(Submit)] == [0, 1]


def test_a_link_is_not_delivered_while_its_last_chunk_is_not_ready(net, prefill, decode):
    number = prefill.open_offer(pages=4)
    decode.place(decode.open_claim([prefill]), pages=4)
    net.deliver()
    prefill.chunk(number, 0, last=False)
    prefill.chunk(number, 1, ready=False)
    prefill.job_landed(prefill.jobs()[0], 8)
    assert prefill.offered(number).poll is KVPoll.Transferring
    prefill.chunk_ready(number, 1)
    prefill.job_landed(prefill.jobs()[1], 8)
    assert prefill.offered(number).poll is KVPoll.Success


def test_a_sender_that_is_cleared_early_says_how_many_pages_it_sent(net, prefill, decode):
    number = prefill.open_offer(pages=4)
    claim = decode.open_claim([prefill])
    decode.place(claim, pages=4)
    net.deliver()
    prefill.chunk(number, 0, pages=3, last=False)
    prefill.clear(Kind.OFFER, number)
    reason = prefill.offered(number).reason
    assert (reason.code, reason.stage) == (Code.ABORTED, "clear")
    assert reason.cause == "the sender was cleared before it was done: 3 of 4 pages sent"
    net.deliver()
    assert decode.claimed(claim).reason == reason


def test_a_sender_that_is_cleared_before_init_was_cleared_before_it_was_done(prefill):
    number = prefill.open_offer(pages=None)
    prefill.clear(Kind.OFFER, number)
    assert prefill.offered(number).reason.cause == "cleared before it was done"


def test_events_of_offers_and_jobs_that_are_not_known_change_nothing(net, prefill):
    prefill.init_offer(99, OfferFacts(1, 4))
    prefill.chunk(99)
    prefill.chunk_ready(99, 0)
    prefill.fail(Kind.OFFER, 99, prefill.book.where.reason(Code.ABORTED, ""))
    prefill.clear(Kind.OFFER, 99)
    prefill.operator_release(Kind.OFFER, 99)
    prefill.job_progress(99)
    prefill.job_landed(99, 1)
    prefill.job_quiet(99)
    prefill.job_failed(99, "", quiet=True)
    assert prefill.effects == []
    assert prefill.book.idle


def test_a_submit_comes_with_the_claims_pages_and_never_before_them(net, prefill, decode, room):
    kinds = [type(effect) for effect in prefill.effects if isinstance(effect, (Submit, Send))]
    assert kinds.index(Submit) > 0
    [submit] = prefill.took(Submit)
    assert submit.info.pages == decode.claimed(1).facts.pages


def ends_shown(end):
    return [effect.claims_success for effect in end.took(Changed) if effect.kind is Kind.OFFER]


def delivered(net, prefill, decode, other):
    """An offer that has delivered to its one claim, which waits for another source: (offer, claim)."""
    net.join(other, decode)
    number, rest = prefill.open_offer(), other.open_offer()
    claim = decode.open_claim([prefill, other])
    decode.place(claim)
    net.deliver()
    prefill.chunk(number)
    prefill.job_landed(prefill.jobs()[-1], 8)
    net.deliver()
    assert prefill.book.offers[number].poll is KVPoll.Success
    assert ends_shown(prefill)[-1] is None
    return rest, claim


def test_an_offer_learns_when_its_claims_have_got_all_from_others_too(net, prefill, decode):
    other = net.end("prefill", 1002)
    rest, _ = delivered(net, prefill, decode, other)
    other.chunk(rest)
    other.job_landed(other.jobs()[-1], 8)
    net.deliver()
    assert ends_shown(prefill)[-1] is True


@pytest.mark.parametrize("how", ["another source fails", "the claim's process is lost"])
def test_an_offer_that_has_delivered_learns_that_its_claim_has_failed(net, prefill, decode, how):
    other = net.end("prefill", 1002)
    rest, _ = delivered(net, prefill, decode, other)
    if how == "another source fails":
        other.abort(Kind.OFFER, rest)
        net.deliver()
    else:
        net.part(prefill, decode)
    assert ends_shown(prefill)[-1] is False
    assert prefill.took(Changed)[-1].poll is KVPoll.Success, "what was delivered stays delivered"
