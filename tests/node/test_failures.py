"""Whoever fails tells everyone who waits: the reason, and where it was noticed."""

import time

import numpy as np
import pytest

from kvferry import KVPoll, KVReceiver, KVSender
from kvferry.engines.seam import Outcome
from kvferry.errors import Code, InputError, ProtocolError, RoomInUse

NOTIFIED_S = 1.0


@pytest.fixture(autouse=True)
def one_end(one_end_per_room):
    """Checked for every room of this file."""


def rooms_in(state, pair, kit, room=1):
    """A sender and a receiver whose room is in that state, as the prefill side sees it."""
    prefill, decode = pair
    prefill.fill([1, 2], seed=room)
    if state == "Bootstrapping":
        receiver = KVReceiver(decode.manager, None, room, peers=[prefill.manager.endpoint])
        receiver.init()
        sender = KVSender(prefill.manager, None, room)
        kit.until(lambda: receiver.poll() is KVPoll.WaitingForInput)
        assert sender.poll() is KVPoll.Bootstrapping
        return sender, receiver
    if state == "Transferring":
        prefill.engine.hold()
    receiver = kit.claim(decode, prefill, room, [4, 5])
    sender = kit.offer(prefill, room, [1, 2], send=state != "WaitingForInput")
    kit.until(lambda: sender.poll() is KVPoll[state] and receiver.poll() in {KVPoll.Transferring, KVPoll.Success})
    if state == "Transferring":
        kit.until(lambda: prefill.engine.held)
    return sender, receiver


@pytest.mark.parametrize("state", ["Bootstrapping", "WaitingForInput", "Transferring"])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_an_abort_in_any_state_reaches_the_other_side_with_reason_and_origin(pair, kit, state, who):
    sender, receiver = rooms_in(state, pair, kit)
    mine, other = (sender, receiver) if who == "prefill" else (receiver, sender)
    mine.abort("the prompt was too long")
    began = time.monotonic()
    assert other.wait(3) is KVPoll.Failed
    assert time.monotonic() - began < NOTIFIED_S
    assert mine.wait(1) is KVPoll.Failed
    for room, foreign in ((mine, False), (other, True)):
        error = room.failure()
        assert "the prompt was too long" in str(error)
        assert error.reason.code is Code.ABORTED
        assert (error.reason.side, error.reason.rank) == (who, "dp0 pp0 cp0 tp0")
        assert error.is_from_another_rank is foreign
    pair[0].engine.release()
    kit.until(lambda: mine.is_release_safe() and other.is_release_safe())
    mine.abort("another reason")
    assert mine.wait(0.1) is KVPoll.Failed
    assert "too long" in str(mine.failure())


def test_an_abort_after_success_changes_nothing(pair, kit):
    sender, receiver = rooms_in("Success", pair, kit)
    assert receiver.wait(5) is KVPoll.Success
    sender.abort("late")
    receiver.abort("late")
    time.sleep(0.2)
    assert (sender.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)
    with pytest.raises(ProtocolError, match="has not failed"):
        sender.failure_exception()


@pytest.mark.parametrize("end", ["abort", "clear"])
def test_a_receiver_that_ended_before_init_has_failed_and_opens_nothing(pair, kit, end):
    _, decode = pair
    receiver = KVReceiver(decode.manager, None, 3, peers=[pair[0].manager.endpoint])
    getattr(receiver, end)()
    assert receiver.wait(2) is KVPoll.Failed
    assert receiver.is_release_safe()
    receiver.init()
    receiver.send_metadata(np.array([1]))
    receiver.clear()
    time.sleep(0.2)
    assert decode.manager.node.book.idle
    assert receiver.poll() is KVPoll.Failed


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("state", ["Bootstrapping", "WaitingForInput", "Transferring"])
def test_clear_of_a_running_room_fails_it_on_both_sides(pair, kit, who, state):
    sender, receiver = rooms_in(state, pair, kit)
    mine, other = (sender, receiver) if who == "prefill" else (receiver, sender)
    mine.clear()
    assert other.wait(NOTIFIED_S) is KVPoll.Failed
    assert "cleared" in str(other.failure())
    assert mine.wait(1) is KVPoll.Failed
    other.clear()
    pair[0].engine.release()
    kit.until(lambda: all(side.manager.node.book.idle for side in pair))


def test_a_room_that_is_cleared_at_once_ends_as_failed(pair, kit):
    """The news of the end must not be lost when the room is forgotten in the same turn."""
    _, decode = pair
    for room in range(30):
        receiver = KVReceiver(decode.manager, None, room, peers=["127.0.0.1:1"])
        receiver.init()
        receiver.clear()
        assert receiver.wait(2) is KVPoll.Failed
        sender = KVSender(pair[0].manager, None, room)
        sender.clear()
        assert sender.wait(2) is KVPoll.Failed


@pytest.mark.parametrize("outcome", [Outcome.FAILED_QUIET, Outcome.FAILED_UNKNOWN])
def test_a_failed_write_fails_both_sides_with_the_engines_words(pair, kit, outcome):
    prefill, decode = pair
    prefill.engine.fail(outcome, "EIO on port 7")
    receiver = kit.claim(decode, prefill, 1, [4, 5])
    sender = kit.offer(prefill, 1, [1, 2])
    assert receiver.wait(3) is KVPoll.Failed
    assert sender.wait(3) is KVPoll.Failed
    for room in (sender, receiver):
        reason = room.failure().reason
        assert reason.code is Code.WRITE_FAILED
        assert "EIO on port 7 [EFAULTY]" in reason.cause
        assert (reason.side, reason.stage) == ("prefill", "transfer")
    prefill.engine.release()
    kit.until(lambda: sender.is_release_safe() and receiver.is_release_safe())


def test_the_failure_of_a_later_chunk_fails_the_room_on_both_sides(pair, kit):
    prefill, decode = pair
    receiver = kit.claim(decode, prefill, 1, [4, 5, 6])
    sender = KVSender(prefill.manager, None, 1)
    sender.init(3, 0)
    sender.send(np.array([1]))
    kit.until(lambda: receiver.get_transfer_metric().transfer_total_bytes > 0)
    prefill.engine.fail(Outcome.FAILED_QUIET, "EIO")
    sender.send(np.array([2]))
    sender.send(np.array([3]))
    assert receiver.wait(NOTIFIED_S) is KVPoll.Failed
    assert sender.wait(1) is KVPoll.Failed
    sender.abort("late")
    assert "EIO" in str(sender.failure())


def test_a_claim_that_comes_after_the_failure_hears_it_at_once(pair, kit):
    prefill, decode = pair
    kit.claim(decode, prefill, 8, [9])
    kit.offer(prefill, 8, [9]).wait(3)
    sender = kit.offer(prefill, 1, [1])
    sender.abort("out of memory")
    sender.clear()
    began = time.monotonic()
    receiver = kit.claim(decode, prefill, 1, [4])
    assert receiver.wait(3) is KVPoll.Failed
    assert time.monotonic() - began < NOTIFIED_S
    assert "out of memory" in str(receiver.failure())
    kit.until(receiver.is_release_safe)


def test_fewer_pages_than_declared_or_more_never_succeed(pair, kit):
    prefill, decode = pair
    receiver = kit.claim(decode, prefill, 1, [4, 5])
    sender = kit.offer(prefill, 1, [1, 2], send=False)
    sender.send(np.array([1]))
    assert receiver.wait(0.3) is KVPoll.Transferring
    with pytest.raises(InputError, match="3 pages were sent"):
        sender.send(np.array([2, 3]))
    assert receiver.wait(NOTIFIED_S) is KVPoll.Failed
    assert "3 pages were sent" in str(receiver.failure())


def test_a_room_number_in_use_is_refused_and_the_first_room_goes_on(pair, kit):
    prefill, decode = pair
    rows = prefill.fill([1, 2], seed=1)
    receiver = kit.claim(decode, prefill, 1, [4, 5])
    sender = KVSender(prefill.manager, None, 1)
    with pytest.raises(RoomInUse, match="room 1 has a sender on this rank already"):
        KVSender(prefill.manager, None, 1)
    with pytest.raises(RoomInUse, match="room 1 has a receiver on this rank already"):
        kit.claim(decode, prefill, 1, [7])
    sender.init(2, 0)
    sender.send(np.array([1, 2]))
    assert receiver.wait(5) is KVPoll.Success
    assert (decode.pages([4, 5]) == rows).all()
    sender.clear()
    receiver.clear()
    assert (sender.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)


def test_a_second_claim_of_the_same_process_is_refused_and_the_first_goes_on(pair, kit, make):
    prefill, decode = pair
    third = make("decode", "faulty")
    rows = prefill.fill([1], seed=1)
    prefill.engine.hold()
    first = kit.claim(decode, prefill, 1, [4])
    sender = kit.offer(prefill, 1, [1])
    kit.until(lambda: prefill.engine.held)
    second = kit.claim(third, prefill, 1, [4])
    assert second.wait(NOTIFIED_S) is KVPoll.Failed
    assert "all 1 claims of the offer are there already" in str(second.failure())
    prefill.engine.release()
    assert first.wait(5) is KVPoll.Success
    assert sender.wait(5) is KVPoll.Success
    assert (decode.pages([4]) == rows).all()


class Raises:
    def query(self):
        raise RuntimeError("the device is gone")


def test_an_after_object_that_raises_fails_its_room_only(pair, kit):
    prefill, decode = pair
    receiver = kit.claim(decode, prefill, 1, [4])
    sender = kit.offer(prefill, 1, [1], send=False)
    sender.send(np.array([1]), after=Raises())
    assert receiver.wait(NOTIFIED_S) is KVPoll.Failed
    assert "the device is gone" in str(receiver.failure())
    assert prefill.manager.health() == ""
    receiver, sender = kit.claim(decode, prefill, 2, [4]), kit.offer(prefill, 2, [1])
    assert receiver.wait(5) is KVPoll.Success


class Never:
    asked = 0

    def query(self):
        self.asked += 1
        return False


def test_an_after_object_of_a_room_that_ended_is_not_asked_any_more(pair, kit):
    prefill, decode = pair
    event = Never()
    kit.claim(decode, prefill, 1, [4])
    sender = kit.offer(prefill, 1, [1], send=False)
    sender.send(np.array([1]), after=event)
    kit.until(lambda: event.asked)
    sender.abort()
    assert sender.wait(1) is KVPoll.Failed
    time.sleep(0.05)
    asked = event.asked
    time.sleep(0.1)
    assert event.asked == asked
    assert prefill.manager.node.control.waiting_after == []


def test_an_after_object_without_query_leaves_the_room_as_it_was(pair, kit):
    prefill, decode = pair
    receiver = kit.claim(decode, prefill, 1, [4])
    sender = kit.offer(prefill, 1, [1], send=False)
    with pytest.raises(InputError, match="after: object has no query"):
        sender.send(np.array([1]), after=object())
    sender.send(np.array([1]))
    assert receiver.wait(5) is KVPoll.Success


def test_a_slow_chunk_that_moves_is_not_stalled_on_either_side(make, kit):
    prefill = make("prefill", "faulty", batch_rows=2, batches_in_flight=1, stall_s=0.6)
    decode = make("decode", "faulty", stall_s=0.6)
    pages = list(range(0, 32, 2))
    rows = prefill.fill(pages, seed=1)
    prefill.engine.delay_s = 0.15
    receiver, sender = kit.claim(decode, prefill, 1, pages), kit.offer(prefill, 1, pages)
    assert receiver.wait(10) is KVPoll.Success, receiver.failure()
    assert sender.wait(1) is KVPoll.Success
    assert (decode.pages(pages) == rows).all()
    assert receiver.get_transfer_metric().transfer_total_bytes == rows.nbytes


def test_a_write_that_does_not_move_is_stalled_on_both_sides(make, kit):
    prefill, decode = make("prefill", "faulty", stall_s=0.4), make("decode", "faulty", stall_s=9.0)
    prefill.engine.hold()
    receiver, sender = kit.claim(decode, prefill, 1, [4]), kit.offer(prefill, 1, [1])
    assert receiver.wait(3) is KVPoll.Failed
    assert sender.wait(1) is KVPoll.Failed
    assert receiver.failure().reason.code is Code.STALLED
    assert sender.failure().reason.code is Code.STALLED
    assert not receiver.is_release_safe()
    assert not sender.is_release_safe()


def test_every_kind_of_failure_has_a_code_of_its_own(make, kit):
    prefill = make("prefill", "faulty", claim_timeout_s=0.4)
    decode = make("decode", "faulty", bootstrap_timeout_s=0.4, hold_limit_s=0.5)
    found = []

    def ends(room):
        assert room.wait(3) is KVPoll.Failed
        found.append(room.failure().reason.code)

    ends(kit.offer(prefill, 1, [1]))
    ends(kit.claim(decode, prefill, 2, [2]))
    ends(kit.claim(decode, "127.0.0.1:1", 3, [3]))
    kit.offer(prefill, 4, [1], tag=1)
    ends(kit.claim(decode, prefill, 4, [4], tag=2))
    sender = kit.offer(prefill, 5, [1], send=False)
    ends(kit.claim(decode, prefill, 5, [5]))
    ends(sender)
    prefill.engine.fail(Outcome.FAILED_QUIET, "EIO")
    kit.offer(prefill, 6, [1])
    ends(kit.claim(decode, prefill, 6, [6]))
    assert [code.value for code in found] == [
        "no_claim", "bootstrap_timeout", "unreachable", "refused", "hold_limit", "hold_limit", "write_failed",
    ]  # fmt: skip


def test_more_rooms_may_wait_for_their_senders_one_after_the_other_than_at_once(pair, kit, monkeypatch):
    monkeypatch.setattr("kvferry.proto.rules.PARKED_PER_PEER", 3)
    prefill, decode = pair
    for room in range(10):
        receiver = kit.claim(decode, prefill, room, [4])
        kit.until(lambda room=room: room in prefill.manager.node.book.parked)
        kit.offer(prefill, room, [1])
        assert receiver.wait(3) is KVPoll.Success, receiver.failure()
