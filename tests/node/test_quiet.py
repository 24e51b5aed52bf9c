"""Failed is not quiet: pages are free only when nothing can read or write them any more."""

import time

import numpy as np
import pytest

from kvferry import KVPoll, KVReceiver
from kvferry.engines.seam import Outcome
from kvferry.ids import Rank
from kvferry.presets import page_major

HALVES = [
    page_major(
        "toy", layers=3, kv_heads=2, head_dim=8, dtype="float16", pages=32, page_tokens=16, heads=(tp, tp + 1),
        rank=Rank(tp=tp),
    )
    for tp in range(2)
]  # fmt: skip


def stays(condition, seconds=0.3):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert condition()
        time.sleep(0.01)


def held_room(pair, kit, room=1, pages=(4, 5)):
    """A room whose writes the prefill side's engine holds."""
    prefill, decode = pair
    prefill.fill([1, 2], seed=room)
    prefill.engine.hold()
    receiver, sender = kit.claim(decode, prefill, room, pages), kit.offer(prefill, room, [1, 2])
    kit.until(lambda: prefill.engine.held)
    return sender, receiver


def orders(pair, sender, receiver):
    """What may happen around a held write, by name."""
    return {
        "decode aborts": lambda: receiver.abort("client gone"),
        "prefill aborts": lambda: sender.abort("too long"),
        "both abort": lambda: (sender.abort("one"), receiver.abort("other")),
        "abort, then the sender is cleared": lambda: (receiver.abort(), sender.clear()),
        "the sender is cleared, then abort": lambda: (sender.clear(), receiver.abort()),
        "both are cleared": lambda: (sender.clear(), receiver.clear()),
    }


@pytest.mark.parametrize("order", list(orders(None, None, None)))
def test_pages_of_both_sides_stay_held_until_the_held_write_is_over(pair, kit, order):
    prefill, decode = pair
    sender, receiver = held_room(pair, kit)
    orders(pair, sender, receiver)[order]()
    assert sender.wait(1) is KVPoll.Failed
    assert receiver.wait(1) is KVPoll.Failed
    stays(lambda: not sender.is_release_safe() and not receiver.is_release_safe())
    prefill.engine.release()
    kit.until(lambda: sender.is_release_safe() and receiver.is_release_safe(), 1.0)
    own = decode.fill([4, 5], seed=99)
    time.sleep(0.1)
    assert (decode.pages([4, 5]) == own).all()


def test_the_next_owner_of_the_pages_keeps_its_bytes(pair, kit):
    prefill, decode = pair
    sender, receiver = held_room(pair, kit)
    receiver.abort("client gone")
    kit.until(lambda: sender.poll() is KVPoll.Failed)
    prefill.engine.release()
    kit.until(receiver.is_release_safe, 1.0)
    rows = prefill.fill([7, 8], seed=2)
    again = kit.claim(decode, prefill, 2, [4, 5])
    kit.offer(prefill, 2, [7, 8])
    assert again.wait(5) is KVPoll.Success
    assert (decode.pages([4, 5]) == rows).all()
    prefill.fill([1, 2], seed=3)
    time.sleep(0.1)
    assert (decode.pages([4, 5]) == rows).all()


def test_without_a_held_write_the_pages_come_back_within_a_second(pair, kit):
    prefill, decode = pair
    receiver, sender = kit.claim(decode, prefill, 1, [4]), kit.offer(prefill, 1, [1], send=False)
    kit.until(lambda: sender.poll() is KVPoll.WaitingForInput)
    assert not receiver.is_release_safe()
    receiver.abort()
    kit.until(lambda: receiver.is_release_safe() and sender.is_release_safe(), 1.0)


def test_what_is_not_proven_in_time_is_quarantined_and_freed_by_the_proof(make, kit):
    pair = make("prefill", "faulty", drain_limit_s=0.2), make("decode", "faulty", drain_limit_s=0.2)
    sender, receiver = held_room(pair, kit)
    receiver.abort()
    for side in pair:
        kit.until(lambda side=side: side.manager.info()["counts"].get("quarantined") == 1)
    stays(lambda: not sender.is_release_safe() and not receiver.is_release_safe())
    pair[0].engine.release()
    kit.until(lambda: sender.is_release_safe() and receiver.is_release_safe(), 1.0)


def test_an_operator_may_free_what_is_quarantined(make, kit):
    pair = make("prefill", "faulty", drain_limit_s=0.2), make("decode", "faulty", drain_limit_s=0.2)
    sender, receiver = held_room(pair, kit)
    sender.abort()
    for side, room in ((pair[1], receiver), (pair[0], sender)):
        kit.until(lambda side=side: side.manager.info()["counts"].get("quarantined") == 1)
        assert not room.is_release_safe()
        side.manager.release_quarantined(1)
        kit.until(room.is_release_safe, 1.0)
        assert room.poll() is KVPoll.Failed


def test_a_failure_without_a_proof_holds_the_pages_until_quiet_follows(pair, kit):
    prefill, decode = pair
    prefill.engine.fail(Outcome.FAILED_UNKNOWN, "no answer")
    receiver, sender = kit.claim(decode, prefill, 1, [4]), kit.offer(prefill, 1, [1])
    assert receiver.wait(3) is KVPoll.Failed
    assert "no answer" in str(receiver.failure())
    stays(lambda: not sender.is_release_safe() and not receiver.is_release_safe())
    prefill.engine.release()
    kit.until(lambda: sender.is_release_safe() and receiver.is_release_safe(), 1.0)


def test_a_failed_sibling_frees_nothing_while_another_one_writes(make, kit):
    sources = [make("prefill", "faulty", layout) for layout in HALVES]
    decode = make("decode", "faulty")
    sources[0].engine.fail(Outcome.FAILED_QUIET, "EIO on rank 0")
    sources[1].engine.hold()
    receiver = kit.claim(decode, sources, 1, [4, 5])
    writing = kit.offer(sources[1], 1, [1, 2])
    kit.until(lambda: sources[1].engine.held)  # else it might hear of the failure before it writes at all
    senders = [kit.offer(sources[0], 1, [1, 2]), writing]
    assert receiver.wait(3) is KVPoll.Failed
    assert all(sender.wait(1) is KVPoll.Failed for sender in senders)
    for room in (receiver, *senders):
        assert "EIO on rank 0" in str(room.failure())
    stays(lambda: not receiver.is_release_safe() and not senders[1].is_release_safe())
    assert senders[0].is_release_safe()
    sources[1].engine.release()
    kit.until(lambda: receiver.is_release_safe() and senders[1].is_release_safe(), 1.0)


def test_two_claims_of_one_offer_that_abort_are_both_freed_after_the_writes_only(make, kit):
    prefill = make("prefill", "faulty")
    sides = [make("decode", "faulty", layout, group=HALVES) for layout in HALVES]
    prefill.engine.hold()
    receivers = [kit.claim(side, prefill, 1, [4, 5]) for side in sides]
    sender = kit.offer(prefill, 1, [1, 2])
    kit.until(lambda: prefill.engine.held >= 2)
    for receiver in receivers:
        receiver.abort("client gone")
    sender.clear()
    assert [room.wait(1) for room in (*receivers, sender)] == [KVPoll.Failed] * 3
    stays(lambda: not any(room.is_release_safe() for room in (*receivers, sender)))
    prefill.engine.release()
    kit.until(lambda: all(room.is_release_safe() for room in (*receivers, sender)), 1.0)


def test_an_abort_on_both_sides_while_every_message_is_lost_settles_when_they_come_through(pair, kit, monkeypatch):
    sender, receiver = held_room(pair, kit)
    for side in pair:
        monkeypatch.setattr(side.manager.node.links, "send", lambda link, data: True)
    sender.abort("one")
    receiver.abort("other")
    assert (sender.wait(1), receiver.wait(1)) == (KVPoll.Failed, KVPoll.Failed)
    pair[0].engine.release()
    stays(lambda: not receiver.is_release_safe(), 0.2)
    monkeypatch.undo()
    kit.until(lambda: receiver.is_release_safe() and sender.is_release_safe(), 2.0)
    sender.clear()
    receiver.clear()
    kit.until(lambda: all(side.manager.node.book.idle for side in pair))


def test_success_comes_with_the_last_of_several_sources_and_all_heads_are_right(make, kit):
    sources = [make("prefill", "faulty", layout) for layout in HALVES]
    decode = make("decode", "faulty")
    rows = [source.fill([1, 2], seed) for seed, source in enumerate(sources)]
    sources[1].engine.hold()
    receiver = kit.claim(decode, sources, 1, [4, 5])
    senders = [kit.offer(source, 1, [1, 2]) for source in sources]
    assert senders[0].wait(3) is KVPoll.Success
    stays(lambda: receiver.poll() is KVPoll.Transferring)
    sources[1].engine.release()
    assert receiver.wait(3) is KVPoll.Success
    # a page holds layers x (k, v) items, each of them one head after the other
    found = decode.pages([4, 5]).reshape(2, 6, 2, -1)
    for head, expected in enumerate(rows):
        assert (found[:, :, head] == expected.reshape(2, 6, -1)).all()


def test_a_source_that_has_delivered_may_leave_while_another_one_still_sends(make, kit):
    sources = [make("prefill", "faulty", layout) for layout in HALVES]
    decode = make("decode", "faulty")
    sources[1].engine.hold()
    receiver = kit.claim(decode, sources, 1, [4, 5])
    senders = [kit.offer(source, 1, [1, 2]) for source in sources]
    assert senders[0].wait(3) is KVPoll.Success
    kit.until(lambda: receiver.get_transfer_metric().transfer_total_bytes > 0)
    sources[0].manager.shutdown()
    stays(lambda: receiver.poll() is KVPoll.Transferring)
    sources[1].engine.release()
    assert receiver.wait(3) is KVPoll.Success, receiver.failure()
    assert senders[1].wait(1) is KVPoll.Success


def test_a_claim_that_was_served_may_leave_while_the_offers_other_claim_is_served(make, kit):
    prefill = make("prefill", "faulty")
    sides = [make("decode", "faulty", layout, group=HALVES) for layout in HALVES]
    first = kit.claim(sides[0], prefill, 1, [4])
    sender = kit.offer(prefill, 1, [1])
    assert first.wait(3) is KVPoll.Success
    sides[0].manager.shutdown()
    second = kit.claim(sides[1], prefill, 1, [4])
    assert second.wait(3) is KVPoll.Success, second.failure()
    assert sender.wait(1) is KVPoll.Success


def test_no_bytes_are_posted_for_a_room_that_failed_before_its_pages_were_known(pair, kit):
    prefill, decode = pair
    receiver = KVReceiver(decode.manager, None, 1, peers=[prefill.manager.endpoint])
    receiver.init()
    sender = kit.offer(prefill, 1, [1])
    kit.until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    sender.abort("the lease has expired")
    receiver.send_metadata(np.array([4]))
    assert receiver.wait(1) is KVPoll.Failed
    assert "the lease has expired" in str(receiver.failure())
    time.sleep(0.1)
    assert (decode.pages([4]) == kit.SENTINEL).all()
