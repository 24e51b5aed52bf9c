"""Peers: the rows of their table, what a lost connection means, what proves that one is gone, and ticks."""

import pytest

from kvferry.errors import Code
from kvferry.ids import KVPoll
from kvferry.proto import rules
from kvferry.proto.effects import Fence, Kind, Release, Send, Stop
from kvferry.proto.forgetting import unproven_before
from kvferry.proto.peer import Peer
from kvferry.proto.rules import PEER, ClaimState, OfferState, PeerEvent, PeerState
from kvferry.wire import StatusPhase, Tick, TransferInfo, TransferStatus


@pytest.fixture
def stranger(prefill, decode):
    return Peer(decode.peer(prefill), decode.book.peers[decode.peer(prefill)].size)


# -- the table


@pytest.mark.row(PeerState.SHAKING, PeerEvent.REGISTERED)
def test_a_registered_peer_is_ready_and_may_speak(stranger):
    assert not stranger.may_speak
    rules.fire(PEER, stranger, PeerEvent.REGISTERED)
    assert stranger.state is PeerState.READY
    assert stranger.may_speak


@pytest.mark.row(PeerState.SHAKING, PeerEvent.LOSE)
@pytest.mark.row(PeerState.LOST, PeerEvent.PROVE_GONE)
def test_a_peer_that_was_lost_before_it_registered_can_be_proven_gone(stranger):
    rules.fire(PEER, stranger, PeerEvent.LOSE)
    assert stranger.state is PeerState.LOST
    rules.fire(PEER, stranger, PeerEvent.PROVE_GONE)
    assert stranger.state is PeerState.GONE


@pytest.mark.row(PeerState.SHAKING, PeerEvent.REFUSE)
@pytest.mark.row(PeerState.REFUSED, PeerEvent.LOSE)
def test_a_refused_peer_does_not_speak_and_can_be_lost(stranger):
    rules.fire(PEER, stranger, PeerEvent.REFUSE)
    assert not stranger.may_speak
    assert not rules.fire(PEER, stranger, PeerEvent.REGISTERED)
    rules.fire(PEER, stranger, PeerEvent.LOSE)
    assert stranger.state is PeerState.LOST


@pytest.mark.row(PeerState.READY, PeerEvent.REFUSE)
def test_a_peer_that_was_ready_can_be_refused(stranger):
    rules.fire(PEER, stranger, PeerEvent.REGISTERED)
    rules.fire(PEER, stranger, PeerEvent.REFUSE)
    assert stranger.state is PeerState.REFUSED


def test_being_ready_twice_changes_nothing(net, prefill, decode, room):
    net.join(prefill, decode)
    assert prefill.book.peers[prefill.peer(decode)].state is PeerState.READY
    assert prefill.offered(room[0]).poll is KVPoll.Transferring


# -- a lost connection


@pytest.mark.row(PeerState.READY, PeerEvent.LOSE)
def test_a_lost_source_fails_its_rooms_and_is_fenced_once_but_releases_nothing(net, prefill, decode):
    claims = [decode.open_claim([prefill], room=room) for room in (1, 2)]
    for claim in claims:
        decode.place(claim)
    net.part(decode, prefill)
    for claim in claims:
        assert decode.claimed(claim).reason.code is Code.PEER_LOST
        assert decode.claimed(claim).state is ClaimState.DRAINING
    assert decode.took(Fence) == [Fence(decode.peer(prefill), None)]
    assert decode.took(Release) == []
    net.part(decode, prefill)
    assert len(decode.took(Fence)) == 1


def test_a_lost_source_that_was_shown_no_pages_needs_no_fence(net, prefill, decode):
    claim = decode.open_claim([prefill])
    net.part(decode, prefill)
    assert decode.claimed(claim).state is ClaimState.QUIET
    assert decode.took(Fence) == []


def test_a_lost_claim_fails_the_offer_which_waits_for_its_own_writes(net, prefill, decode, room):
    number, _, job = room
    net.part(prefill, decode)
    assert prefill.offered(number).reason.code is Code.PEER_LOST
    assert prefill.took(Stop) == [Stop(job)]
    assert prefill.took(Release) == []
    prefill.job_failed(job, "stopped", quiet=True)
    assert prefill.took(Release) == [Release(Kind.OFFER, number)]


def test_an_offer_that_has_ended_is_not_touched_by_a_lost_peer(net, prefill, decode, room):
    number, _, job = room
    prefill.job_landed(job, 8)
    net.part(prefill, decode)
    assert prefill.offered(number).poll is KVPoll.Success


def test_a_source_that_had_delivered_can_be_lost_while_another_one_still_sends(net, prefill, decode):
    other = net.end("prefill", 1002)
    net.join(other, decode)
    claim = decode.open_claim([prefill, other])
    decode.place(claim)
    for source in (prefill, other):
        number = source.open_offer()
        net.deliver()
        source.chunk(number)
    prefill.job_landed(1, 8)
    net.deliver()
    net.part(decode, prefill)
    assert decode.claimed(claim).poll is KVPoll.Transferring
    assert decode.took(Fence) == []
    other.job_landed(1, 8)
    net.deliver()
    assert decode.claimed(claim).poll is KVPoll.Success
    decode.clear(Kind.CLAIM, claim)
    net.wait(5)
    assert decode.book.idle


def test_a_claim_that_was_served_can_be_lost_while_another_one_is_still_sent(net, prefill, decode):
    other = net.end("decode", 2002)
    net.join(prefill, other)
    number = prefill.open_offer()
    for end in (decode, other):
        end.place(end.open_claim([prefill], fan_in=2))
    net.deliver()
    prefill.chunk(number)
    first, second = prefill.jobs()
    prefill.job_landed(first, 8)
    net.part(prefill, decode)
    assert prefill.offered(number).poll is KVPoll.Transferring
    prefill.job_landed(second, 8)
    assert prefill.offered(number).poll is KVPoll.Success


def test_the_fence_of_a_lost_source_proves_it_gone_and_frees_the_pages(net, prefill, decode):
    claim = decode.open_claim([prefill])
    decode.place(claim)
    peer = decode.peer(prefill)
    net.part(decode, prefill)
    decode.fence_done(peer, None)
    assert decode.book.peers[peer].state is PeerState.GONE
    assert decode.took(Release) == [Release(Kind.CLAIM, claim)]
    decode.peer_gone(peer)
    assert decode.took(Release) == [Release(Kind.CLAIM, claim)]


def test_a_lost_peer_does_not_speak_again(net, prefill, decode):
    claim = decode.open_claim([prefill])
    decode.place(claim)
    peer = decode.peer(prefill)
    net.part(decode, prefill)
    decode.receive(peer, TransferStatus(7, claim, 1, StatusPhase.FAILED, quiet=True))
    assert decode.took(Release) == []
    assert decode.book.counts["foreign"] == 1


def test_peers_that_are_not_known_can_be_lost_and_gone_without_effect(net, prefill):
    stranger = net.end("decode", 2999)
    net.part(prefill, stranger)
    prefill.peer_gone(prefill.peer(stranger))
    assert prefill.effects == []


def test_a_lost_peer_is_forgotten_with_its_last_room(net, prefill, decode, aborted):
    claim = decode.open_claim([prefill])
    decode.place(claim)
    peer = decode.peer(prefill)
    net.part(decode, prefill)
    decode.clear(Kind.CLAIM, claim)
    net.wait(1, deliver=False)
    assert peer in decode.book.peers
    decode.peer_gone(peer)
    net.wait(1, deliver=False)
    assert peer not in decode.book.peers
    assert decode.book.idle


def test_the_links_of_a_lost_peer_are_kept_while_their_writes_are_out(net, prefill, decode, room):
    number, _, job = room
    prefill.clear(Kind.OFFER, number)
    net.part(prefill, decode)
    net.wait(1, deliver=False)
    assert not prefill.book.idle
    prefill.job_quiet(job)
    net.wait(0.5, deliver=False)
    assert prefill.book.idle
    assert prefill.book.peers == {}


# -- epochs


def test_a_new_epoch_of_a_process_loses_its_earlier_ones(net, prefill, decode, room):
    number, claim, _ = room
    net.join(prefill, decode, epoch=2)
    for end, other, kind, room_id in (
        (prefill, decode, Kind.OFFER, number),
        (decode, prefill, Kind.CLAIM, claim),
    ):
        earlier, later = end.peer(other, 1), end.peer(other, 2)
        assert end.book.peers[earlier].state is PeerState.LOST
        assert end.book.peers[later].state is PeerState.READY
        assert end.book.room(kind, room_id).reason.cause == f"{later} replaced {earlier}"


def test_an_epoch_of_another_process_loses_nothing(net, prefill, decode, room):
    other = net.end("decode", 2002)
    net.join(prefill, other, epoch=9)
    assert prefill.offered(room[0]).poll is KVPoll.Transferring


def test_pages_come_back_over_a_new_epoch_once_the_writes_of_the_old_one_are_quiet(net, prefill, decode, room):
    _number, claim, job = room
    net.join(prefill, decode, epoch=2)
    net.wait(3)
    assert decode.claimed(claim).state is ClaimState.DRAINING
    prefill.job_failed(job, "stopped", quiet=True)
    net.wait(3)
    assert decode.claimed(claim).state is ClaimState.QUIET
    assert decode.took(Release) == [Release(Kind.CLAIM, claim)]


def test_rooms_go_on_over_a_new_epoch(net, prefill, decode):
    net.join(prefill, decode, epoch=2)
    number = prefill.open_offer()
    claim = decode.open_claim([prefill], epoch=2)
    decode.place(claim)
    net.deliver()
    prefill.chunk(number)
    prefill.job_landed(prefill.jobs()[0], 8)
    net.deliver()
    assert decode.claimed(claim).poll is KVPoll.Success


def test_two_epochs_that_became_ready_in_the_wrong_order_harm_nothing(net, prefill, decode):
    net.join(prefill, decode, epoch=3)
    net.join(prefill, decode, epoch=2)
    decode.receive(decode.peer(prefill, 3), Tick(1, quiet_below=3))
    assert decode.book.peers[decode.peer(prefill, 2)].state is PeerState.READY


# -- ticks


def ticks(end):
    return [effect.message for effect in end.took(Send) if isinstance(effect.message, Tick)]


def test_two_books_without_rooms_tick_once_and_are_silent(net, prefill, decode):
    net.wait(30)
    assert len(ticks(prefill)) <= 1
    assert len(ticks(decode)) <= 1


def test_ticks_come_at_most_once_per_heartbeat(net, prefill, decode, room):
    before = len(ticks(decode))
    net.wait(2, deliver=False)
    assert len(ticks(decode)) - before <= 3


def test_a_tick_says_what_is_over_what_is_remembered_and_what_is_quiet(net, prefill, decode, room):
    net.wait(1.25)
    [tick] = ticks(prefill)[-1:]
    assert (tick.live_offers, tick.low_claim, tick.quiet_below) == (1, 1, 1)
    assert ticks(decode)[-1].want_ack
    assert tick.want_ack


def test_a_claim_is_forgotten_though_both_sides_last_words_were_lost(net, prefill, decode):
    claim = decode.open_claim([prefill])
    decode.receive(decode.peer(prefill), Tick(1))  # said before the claim came there
    net.deliver()
    decode.abort(Kind.CLAIM, claim)
    decode.clear(Kind.CLAIM, claim)
    net.deliver()
    net.wait(2, deliver=False)
    net.lose()
    assert prefill.book.links
    assert decode.book.peers[decode.peer(prefill)].live_there == 0
    net.wait(5)
    assert not prefill.book.links


def test_an_older_tick_is_ignored(stranger):
    assert stranger.hear(Tick(2, low_claim=5, live_offers=1))
    assert not stranger.hear(Tick(1, low_claim=9, live_offers=0))
    assert not stranger.hear(Tick(2, low_claim=9))
    assert (stranger.low_claim, stranger.live_there) == (5, 1)


def test_the_low_water_mark_never_falls(stranger):
    stranger.hear(Tick(1, low_claim=5))
    stranger.hear(Tick(2, low_claim=3))
    assert stranger.low_claim == 5


def test_an_older_tick_of_a_peer_forgets_nothing(net, prefill, decode, room):
    peer = prefill.peer(decode)
    prefill.receive(peer, Tick(50, low_claim=0))
    prefill.receive(peer, Tick(49, low_claim=99))
    assert prefill.book.peers[peer].low_claim == 0


def test_a_claim_was_shown_so_the_peer_remembers_at_least_one(net, prefill, decode):
    decode.open_claim([prefill])
    assert decode.book.peers[decode.peer(prefill)].live_there == 1


def test_who_waits_for_a_proof_over_a_new_epoch_asks_for_it(net, prefill, decode, room):
    net.join(prefill, decode, epoch=2)
    net.lose()
    net.wait(2, deliver=False)
    assert any(tick.want_ack for tick in ticks(decode))


def test_states_of_both_ends_of_a_cut_connection_are_failed(net, prefill, decode, room):
    number, claim, _ = room
    net.part(prefill, decode)
    net.part(decode, prefill)
    assert prefill.offered(number).state is OfferState.DRAINING
    assert decode.claimed(claim).state is ClaimState.DRAINING
    assert decode.sent(TransferInfo)[-1].phase.value == "pages"


def test_only_pages_that_wait_for_a_lost_epoch_of_the_same_process_lack_a_proof(net, prefill, decode, room):
    other = net.end("prefill", 1002)
    net.join(other, decode)
    first, stranger = (decode.book.peers[decode.peer(each)] for each in (prefill, other))
    assert not unproven_before(decode.book, first)
    net.part(decode, prefill)
    assert unproven_before(decode.book, first)
    assert not unproven_before(decode.book, stranger)
