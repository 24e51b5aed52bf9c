"""The book: rooms that are not known yet or not any more, peers that misbehave, and forgetting."""

import pytest

from kvferry.errors import Code, RoomInUse
from kvferry.ids import KVPoll
from kvferry.proto import rules
from kvferry.proto.effects import Forget, Kind, Release, Send, Submit
from kvferry.proto.forgetting import low_claim
from kvferry.proto.rules import OfferState
from kvferry.wire import Credits, InfoPhase, StatusPhase, Tick, TransferInfo, TransferStatus


def info(claim, rev=1, phase=InfoPhase.OPEN, room=7, **more):
    return TransferInfo(room, claim, rev, phase, **more)


# -- room numbers


@pytest.mark.parametrize("kind", Kind)
def test_a_room_number_is_used_once_at_a_time_per_side_of_a_rank(decode, kind):
    open_room = decode.offer if kind is Kind.OFFER else decode.claim
    number = open_room(7)
    with pytest.raises(RoomInUse, match=r"room 7 has a \w+ on this rank already .*clear"):
        open_room(7)
    decode.clear(kind, number)
    assert open_room(7) == number + 1


def test_a_room_that_is_cleared_twice_is_cleared_once(prefill):
    number = prefill.open_offer()
    prefill.clear(Kind.OFFER, number)
    again = prefill.open_offer()
    prefill.clear(Kind.OFFER, number)
    assert prefill.book.offer_of == {7: again}


def test_clearing_a_room_leaves_a_later_one_of_the_same_number_alone(prefill):
    number = prefill.open_offer()
    prefill.book.offer_of[7] = 99
    prefill.clear(Kind.OFFER, number)
    assert prefill.book.offer_of == {7: 99}


# -- claims that come first


def test_a_claim_that_comes_first_is_parked_and_joins_when_its_offer_opens(net, prefill, decode):
    claim = decode.open_claim([prefill])
    net.deliver()
    assert prefill.sent(TransferStatus) == []
    number = prefill.open_offer()
    assert len(prefill.offered(number).links) == 1
    assert prefill.book.parked == {}
    net.deliver()
    assert decode.claimed(claim).poll is KVPoll.WaitingForInput


def test_a_parked_claim_that_says_more_is_parked_once(net, prefill, decode):
    claim = decode.open_claim([prefill])
    net.deliver()
    decode.place(claim)
    net.deliver()
    [link] = prefill.book.parked[7]
    assert link.info.phase is InfoPhase.PAGES


def test_parked_claims_are_bounded_per_peer_and_make_room_when_they_are_gone(net, prefill, decode, monkeypatch):
    monkeypatch.setattr(rules, "PARKED_PER_PEER", 2)
    claims = [decode.open_claim([prefill], room=room) for room in (1, 2, 3)]
    net.deliver()
    reason = decode.claimed(claims[2]).reason
    assert (reason.code, reason.peer) == (Code.REFUSED, str(prefill.peer(decode)))
    assert reason.cause == "2 claims of this peer wait for offers already"
    assert sorted(prefill.book.parked) == [1, 2]
    for room in (1, 2):
        prefill.open_offer(room=room)
    for room in (4, 5):
        claim = decode.open_claim([prefill], room=room)
        net.deliver()
        assert decode.claimed(claim).reason is None


def test_remembered_claims_are_bounded_per_peer_and_make_room_when_they_are_over(net, prefill, decode, monkeypatch):
    monkeypatch.setattr(rules, "LINKS_PER_PEER", 2)
    claims = [decode.open_claim([prefill], room=room) for room in (1, 2, 3)]
    net.deliver()
    assert sorted(prefill.book.parked) == [1, 2]
    assert prefill.book.counts["over the limit"] == 1
    for claim in claims[:2]:
        decode.abort(Kind.CLAIM, claim)
        decode.clear(Kind.CLAIM, claim)
    net.wait(5.0)
    assert sorted(prefill.book.parked) == [3]


def test_two_claims_can_wait_for_one_room(net, prefill, decode):
    other = net.end("decode", 2002)
    net.join(prefill, other)
    for end in (decode, other):
        end.open_claim([prefill], fan_in=2)
    net.deliver()
    assert len(prefill.book.parked[7]) == 2
    net.part(prefill, other)
    assert len(prefill.book.parked[7]) == 1
    assert len(prefill.offered(prefill.open_offer()).links) == 1


def test_parked_claims_of_a_lost_peer_are_dropped(net, prefill, decode):
    decode.open_claim([prefill])
    net.deliver()
    net.part(prefill, decode)
    assert prefill.book.parked == {}
    net.wait(1)
    assert prefill.book.idle
    assert prefill.offered(prefill.open_offer()).links == []


def test_a_parked_claim_that_closes_is_answered_quiet_and_never_joins(net, prefill, decode, aborted):
    claim = decode.open_claim([prefill])
    net.deliver()
    decode.fail(Kind.CLAIM, claim, aborted)
    net.deliver()
    [status] = prefill.sent(TransferStatus)
    assert (status.phase, status.quiet, status.offer, status.reason) == (StatusPhase.FAILED, True, 0, aborted)
    assert prefill.offered(prefill.open_offer()).links == []


def test_a_second_claim_of_one_process_is_refused(net, prefill, decode):
    number = prefill.open_offer()
    first = decode.open_claim([prefill])
    net.deliver()
    prefill.receive(prefill.peer(decode), info(claim=50))
    [link] = prefill.offered(number).links
    assert link.info.claim == first
    refusal = prefill.sent(TransferStatus)[-1]
    assert (refusal.claim, refusal.phase, refusal.quiet) == (50, StatusPhase.FAILED, True)
    assert refusal.reason.cause == "an earlier claim of the same process is in this offer already"


# -- what is remembered


def test_a_refused_claim_stays_refused_even_by_the_offer_that_it_was_meant_for(net, prefill, decode):
    wrong = prefill.open_offer(tag=1)
    claim = decode.open_claim([prefill], tag=2)
    net.deliver()
    assert decode.claimed(claim).poll is KVPoll.Failed
    net.lose()
    prefill.clear(Kind.OFFER, wrong)
    right = prefill.open_offer(tag=2)
    peer = prefill.peer(decode)
    prefill.receive(peer, info(claim, rev=9, phase=InfoPhase.PAGES, tag=2))
    prefill.receive(peer, info(claim, rev=10, phase=InfoPhase.CLOSED, tag=2))
    assert prefill.offered(right).links == []
    assert prefill.offered(right).poll is KVPoll.Bootstrapping


def test_a_close_that_overtakes_its_open_is_remembered(net, prefill, decode, aborted):
    claim = decode.open_claim([prefill])
    [opened] = net.lose()
    decode.fail(Kind.CLAIM, claim, aborted)
    net.deliver()
    number = prefill.open_offer()
    prefill.receive(opened.sender, opened.message)
    assert prefill.offered(number).links == []
    status = prefill.sent(TransferStatus)[-1]
    assert (status.phase, status.quiet) == (StatusPhase.FAILED, True)


def test_a_close_without_a_reason_is_an_abort(net, prefill, decode):
    prefill.receive(prefill.peer(decode), info(1, phase=InfoPhase.CLOSED))
    number = prefill.open_offer(room=8)
    prefill.receive(prefill.peer(decode), info(2, room=8))
    prefill.receive(prefill.peer(decode), info(2, rev=2, room=8, phase=InfoPhase.CLOSED))
    for reason in (prefill.sent(TransferStatus)[0].reason, prefill.offered(number).reason):
        assert (reason.code, reason.cause) == (Code.ABORTED, "the claim was closed")


def test_a_success_that_closes_a_claim_fails_nothing(net, prefill, decode, room):
    number, claim, job = room
    prefill.job_landed(job, 8)
    net.deliver()
    assert prefill.offered(number).reason is None
    assert prefill.offered(number).links[0].talk.seen == decode.claimed(claim).views[decode.peer(prefill)].talk.rev


def test_a_tombstone_tells_a_claim_that_comes_after_the_failure(net, prefill, decode, aborted):
    number = prefill.open_offer(tag=5)
    prefill.fail(Kind.OFFER, number, aborted)
    prefill.clear(Kind.OFFER, number)
    claim = decode.open_claim([prefill], tag=5)
    net.deliver()
    assert decode.claimed(claim).reason == aborted


def test_a_tombstone_says_nothing_to_a_claim_of_another_request(net, prefill, decode, aborted):
    number = prefill.open_offer(tag=5)
    prefill.fail(Kind.OFFER, number, aborted)
    prefill.clear(Kind.OFFER, number)
    claim = decode.open_claim([prefill], tag=6)
    net.deliver()
    assert decode.claimed(claim).reason is None
    assert len(prefill.book.parked[7]) == 1


def test_a_tombstone_is_not_for_a_process_that_was_in_the_offer(net, prefill, decode, aborted):
    number = prefill.open_offer()
    first = decode.open_claim([prefill], fan_in=2)
    net.deliver()
    prefill.fail(Kind.OFFER, number, aborted)
    net.deliver()
    prefill.clear(Kind.OFFER, number)
    decode.clear(Kind.CLAIM, first)
    again = decode.open_claim([prefill])
    net.deliver()
    assert decode.claimed(again).reason is None


def test_a_live_offer_comes_before_the_tombstone_of_an_earlier_one(net, prefill, decode, aborted):
    number = prefill.open_offer()
    prefill.fail(Kind.OFFER, number, aborted)
    prefill.clear(Kind.OFFER, number)
    again = prefill.open_offer()
    decode.open_claim([prefill])
    net.deliver()
    assert len(prefill.offered(again).links) == 1


def test_a_tombstone_ends_with_the_claim_timeout(net, prefill, decode, aborted):
    prefill.fail(Kind.OFFER, prefill.open_offer(), aborted)
    net.wait(5.75)
    assert list(prefill.book.tombstones) == [7]
    net.wait(0.25)
    assert prefill.book.tombstones == {}


def test_an_offer_whose_claims_have_all_come_leaves_no_tombstone(net, prefill, decode, room):
    prefill.abort(Kind.OFFER, room[0])
    assert prefill.book.tombstones == {}


# -- forgetting


def test_a_settled_and_cleared_room_is_forgotten_when_both_ends_know(net, prefill, decode, room):
    number, claim, job = room
    prefill.job_landed(job, 8)
    prefill.clear(Kind.OFFER, number)
    net.wait(3)
    assert prefill.took(Forget) == []
    decode.clear(Kind.CLAIM, claim)
    net.wait(3)
    assert prefill.took(Forget) == [Forget(Kind.OFFER, number)]
    assert decode.took(Forget) == [Forget(Kind.CLAIM, claim)]
    assert prefill.book.idle
    assert decode.book.idle
    late = prefill.book.counts["late"]
    prefill.receive(prefill.peer(decode), info(claim, rev=99))
    assert prefill.book.links == {}
    assert prefill.book.counts["late"] == late + 1


def test_a_claim_is_not_forgotten_before_its_close_is_acknowledged(net, prefill, decode, room):
    _number, claim, job = room
    prefill.job_landed(job, 8)
    net.deliver()
    net.lose()
    decode.clear(Kind.CLAIM, claim)
    view = decode.claimed(claim).views[decode.peer(prefill)]
    assert not view.talk.settled
    net.wait(20, deliver=False)
    assert claim in decode.book.claims
    net.wait(3)
    assert claim not in decode.book.claims


def test_a_claim_is_not_forgotten_before_each_of_its_sources_knows(net, prefill, decode):
    other = net.end("prefill", 1002)
    net.join(other, decode)
    claim = decode.open_claim([prefill, other])
    decode.clear(Kind.CLAIM, claim)
    decode.receive(decode.peer(prefill), TransferStatus(7, claim, 1, StatusPhase.FAILED, ack=2))
    assert decode.took(Forget) == []
    decode.receive(decode.peer(other), TransferStatus(7, claim, 1, StatusPhase.FAILED, ack=2))
    assert decode.took(Forget) == [Forget(Kind.CLAIM, claim)]


def test_a_refused_claim_is_forgotten_while_the_offer_waits_on(net, prefill, decode):
    prefill.open_offer(tag=1)
    claim = decode.open_claim([prefill], tag=2)
    net.deliver()
    assert prefill.sent(TransferStatus)[-1].offer == 0
    decode.clear(Kind.CLAIM, claim)
    net.wait(4)
    assert prefill.book.links == {}
    assert prefill.offered(1).poll is KVPoll.Bootstrapping


def test_a_status_that_acknowledges_the_close_lets_the_claim_be_forgotten(net, prefill, decode):
    claim = decode.open_claim([prefill])
    decode.clear(Kind.CLAIM, claim)
    net.lose()
    peer = decode.peer(prefill)
    decode.receive(peer, TransferStatus(7, claim, 1, StatusPhase.FAILED, ack=2, quiet=True))
    assert decode.took(Forget) == [Forget(Kind.CLAIM, claim)]
    decode.receive(peer, TransferStatus(7, claim, 2, StatusPhase.FAILED))
    assert decode.book.counts["late"] >= 1


def test_a_claim_that_resolves_holds_the_low_water_mark_down(prefill, decode):
    record = decode.book.peers[decode.peer(prefill)]
    assert low_claim(decode.book, record) == 1
    decode.claim(1)
    decode.open_claim([prefill], room=2)
    assert low_claim(decode.book, record) == 1
    decode.abort(Kind.CLAIM, 1)
    assert low_claim(decode.book, record) == 1  # its sources are still to hear of it
    decode.unresolved(1, decode.claimed(1).reason)
    assert low_claim(decode.book, record) == 2


# -- shutdown


def test_shutdown_fails_every_live_room_and_refuses_new_ones(net, prefill, decode, aborted):
    waiting, claim = prefill.open_offer(room=1), decode.open_claim([prefill], room=1)
    net.deliver()
    for end in (prefill, decode):
        end.shutdown(aborted)
    assert prefill.offered(waiting).reason == aborted
    assert decode.claimed(claim).reason == aborted
    assert prefill.sent(TransferStatus)[-1].reason == aborted
    assert decode.sent(TransferInfo)[-1].reason == aborted
    assert prefill.offered(prefill.open_offer(room=2, pages=None)).reason == aborted
    assert decode.claimed(decode.claim(2)).reason == aborted


def test_shutdown_leaves_what_has_ended_alone(net, prefill, decode, room, aborted):
    number, claim, job = room
    prefill.job_landed(job, 8)
    net.deliver()
    prefill.shutdown(aborted)
    decode.shutdown(aborted)
    assert prefill.offered(number).poll is KVPoll.Success
    assert decode.claimed(claim).poll is KVPoll.Success


# -- peers that say what they should not


def test_a_stranger_is_not_heard(net, prefill, decode):
    prefill.open_offer()
    stranger = net.end("decode", 2999)
    prefill.receive(prefill.peer(stranger), info(1))
    assert prefill.book.links == {}
    assert prefill.book.counts["foreign"] == 1


def test_a_kind_of_message_that_is_no_room_message_is_counted_and_ignored(prefill, decode):
    before = len(prefill.effects)
    prefill.receive(prefill.peer(decode), Credits())
    assert prefill.book.counts["foreign"] == 1
    assert prefill.effects[before:] == []


def test_a_claim_can_not_move_to_another_room(net, prefill, decode):
    number, other = prefill.open_offer(room=7), prefill.open_offer(room=8)
    prefill.receive(prefill.peer(decode), info(1, room=7))
    prefill.receive(prefill.peer(decode), info(1, rev=2, room=8))
    assert len(prefill.offered(number).links) == 1
    assert prefill.offered(other).links == []
    assert prefill.book.counts["foreign"] == 1


def test_pages_once_named_stay_as_they_were_checked(net, prefill, decode, room):
    number, claim, _ = room
    prefill.receive(prefill.peer(decode), info(claim, rev=50, phase=InfoPhase.PAGES, pages={"kv": b"\1\0\0\0"}))
    prefill.receive(prefill.peer(decode), info(claim, rev=51, phase=InfoPhase.OPEN))
    [link] = prefill.offered(number).links
    assert link.info.phase is InfoPhase.PAGES
    assert link.info.pages == decode.claimed(claim).facts.pages


def test_a_snapshot_for_an_offer_that_has_ended_posts_nothing(net, prefill, decode, room, aborted):
    number, claim, _ = room
    prefill.fail(Kind.OFFER, number, aborted)
    prefill.receive(prefill.peer(decode), info(claim, rev=50, phase=InfoPhase.PAGES))
    assert len(prefill.took(Submit)) == 1
    assert prefill.offered(number).reason == aborted


def test_a_revision_below_one_is_no_news(prefill, decode):
    prefill.open_offer()
    for rev in (0, -5):
        prefill.receive(prefill.peer(decode), info(1, rev=rev))
    assert prefill.offered(1).links == []


@pytest.mark.parametrize("fan_in", [0, -1, 2**63])
def test_no_fan_in_completes_or_breaks_an_offer(net, prefill, decode, fan_in):
    number = prefill.open_offer()
    prefill.receive(prefill.peer(decode), info(1, phase=InfoPhase.PAGES, fan_in=fan_in))
    prefill.chunk(number)
    for job in prefill.jobs():
        prefill.job_landed(job, 8)
    assert prefill.offered(number).poll is not KVPoll.Success
    net.wait(6)
    assert prefill.offered(number).reason.code is Code.NO_CLAIM


def test_a_status_for_a_claim_or_from_a_source_that_is_not_known_is_late(net, prefill, decode):
    other = net.end("prefill", 1002)
    net.join(other, decode)
    claim = decode.open_claim([prefill])
    decode.receive(decode.peer(prefill), TransferStatus(7, 99, 1, StatusPhase.FAILED))
    decode.receive(decode.peer(other), TransferStatus(7, claim, 1, StatusPhase.FAILED))
    assert decode.claimed(claim).reason is None
    assert decode.book.counts["late"] == 2


def test_a_proof_about_a_connection_that_stands_is_ignored(net, prefill, decode, room):
    peer = decode.peer(prefill)
    decode.receive(peer, Tick(99, quiet_below=2**63))
    assert decode.book.peers[peer].state is rules.PeerState.READY
    assert decode.took(Release) == []


def test_nothing_is_said_to_a_peer_that_is_not_ready(net, prefill, decode, room):
    number, _claim, _ = room
    net.part(prefill, decode)
    before = len(prefill.took(Send))
    net.wait(3, deliver=False)
    assert prefill.offered(number).state is OfferState.DRAINING
    assert len(prefill.took(Send)) == before
