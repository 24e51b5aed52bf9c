"""Snapshots: revisions, acknowledgements, repetition."""

import itertools

import pytest

from kvferry.proto.dialogue import Dialogue
from kvferry.proto.effects import Kind
from kvferry.wire import InfoPhase, StatusPhase, Tick, TransferInfo, TransferStatus


def test_a_higher_revision_is_news_and_the_same_or_a_lower_one_is_not():
    talk = Dialogue()
    assert talk.hear(2, 0, want_ack=False)
    assert not talk.hear(2, 0, want_ack=False)
    assert not talk.hear(1, 0, want_ack=False)
    assert talk.hear(3, 0, want_ack=False)
    assert talk.seen == 3


def test_who_has_said_nothing_and_heard_nothing_owes_nothing():
    talk = Dialogue()
    assert talk.settled
    assert not talk.due(1000.0)


def test_an_acknowledgement_of_what_was_never_said_is_bounded_by_what_was():
    talk = Dialogue()
    talk.publish()
    talk.hear(1, 99, want_ack=False)
    talk.publish()
    assert not talk.settled


def test_an_older_acknowledgement_takes_nothing_back():
    talk = Dialogue()
    talk.publish()
    talk.hear(1, 1, want_ack=False)
    talk.hear(1, 0, want_ack=False)
    assert talk.settled


def test_repetitions_back_off_up_to_ten_ticks_and_a_change_starts_them_anew():
    talk = Dialogue()
    talk.publish()
    now, times = 0.0, []
    for _ in range(200):
        if talk.due(now):
            times.append(now)
            talk.sent(now, tick_s=1.0)
        now += 0.5
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[:4] == [2.5, 5.0, 10.0, 10.0]
    assert set(pauses[2:]) == {10.0}
    talk.publish()
    talk.sent(now, tick_s=1.0)
    assert talk.repeat_at == now + 2.5


def test_what_is_acknowledged_is_not_repeated_but_a_debt_is_paid_once():
    talk = Dialogue()
    talk.publish()
    talk.sent(0.0, 1.0)
    talk.hear(1, 1, want_ack=True)
    assert talk.due(0.0)
    talk.sent(0.0, 1.0)
    assert not talk.due(1000.0)


def test_a_lost_message_is_repeated_until_it_arrives(net, prefill, decode):
    prefill.open_offer()
    claim = decode.open_claim([prefill])
    for _ in range(2):
        net.wait(2.5, deliver=False)
        lost = [flight.message for flight in net.lose() if isinstance(flight.message, TransferInfo)]
        assert lost
        assert {info.rev for info in lost} == {1}
    net.wait(2.5)
    assert decode.claimed(claim).accepted


@pytest.mark.parametrize("phase", ["open", "pages", "over"])
def test_two_books_that_are_left_alone_stop_sending_rooms_messages(net, prefill, decode, phase):
    number = prefill.open_offer()
    claim = decode.open_claim([prefill])
    if phase != "open":
        decode.place(claim)
    if phase == "over":
        net.deliver()
        prefill.chunk(number)
        prefill.job_landed(prefill.jobs()[0], 8)
    net.wait(5)
    prefill.effects.clear()
    decode.effects.clear()
    net.wait(30)
    assert prefill.sent(TransferStatus) == []
    assert decode.sent(TransferInfo) == []


def test_two_books_whose_rooms_are_over_and_cleared_say_nothing_at_all(net, prefill, decode, room):
    number, claim, job = room
    prefill.job_landed(job, 8)
    net.deliver()
    prefill.clear(Kind.OFFER, number)
    decode.clear(Kind.CLAIM, claim)
    net.wait(10)
    assert prefill.book.idle
    assert decode.book.idle
    prefill.effects.clear()
    decode.effects.clear()
    net.wait(60)
    assert prefill.effects == []
    assert decode.effects == []


def test_no_message_is_sent_because_a_message_arrived(net, prefill, decode):
    prefill.open_offer()
    decode.open_claim([prefill])
    net.deliver()
    before = len(prefill.effects)
    info = TransferInfo(7, 1, 1, InfoPhase.OPEN, ack=0, want_ack=True)
    for _ in range(100):
        prefill.receive(prefill.peer(decode), info)
    assert prefill.effects[before:] == []
    prefill.on_tick()
    answers = [effect.message for effect in prefill.effects[before:] if hasattr(effect, "message")]
    assert [type(answer) for answer in answers] == [TransferStatus, Tick]


def test_doubled_and_reordered_messages_change_nothing(net, prefill, decode, room):
    number, claim, job = room
    prefill.job_landed(job, 8)
    flights = net.lose()
    old = TransferStatus(7, claim, 1, StatusPhase.QUEUED, offer=number)
    for flight in [*flights, *flights]:
        flight.target.receive(flight.sender, flight.message)
    decode.receive(decode.peer(prefill), old)
    assert decode.claimed(claim).bytes_landed == 8
    assert decode.claimed(claim).views[decode.peer(prefill)].status.phase is StatusPhase.DELIVERED
