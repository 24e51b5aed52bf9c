"""Whoever finds the turn free takes it: no news is lost and nobody waits for another, whatever the callers' habits."""

import contextlib
import os
import select
import threading
import time

import numpy as np
import pytest

from kvferry import KVPoll, KVReceiver, KVSender
from kvferry.engines.seam import Caps
from kvferry.node import turn as turns

ROOMS = 40


def by_wait(room):
    return room.wait(20)


def by_yielding(room):
    return polled(room, os.sched_yield)


def by_naps(room):
    return polled(room, lambda: time.sleep(0.0002))


def by_descriptor(room):
    return polled(room, lambda: select.select([room.fileno()], [], [], 20))


def busy(room):
    return polled(room, lambda: sum(range(3000)))


def polled(room, between):
    deadline = time.monotonic() + 20
    while room.poll() not in {KVPoll.Success, KVPoll.Failed} and time.monotonic() < deadline:
        between()
    return room.poll()


HABITS = [by_wait, by_yielding, by_naps, by_descriptor, busy]


def test_callers_of_all_habits_at_once_get_all_their_rooms(make, kit):
    prefill, decode = make("prefill"), make("decode")
    rows = prefill.fill(range(32), seed=1)
    failures = []

    def serve(lane, habit):
        for turn in range(ROOMS):
            room, pages = lane * ROOMS + turn, [lane * 3, lane * 3 + 1]
            sender = kit.offer(prefill, room, pages, tag=room + 1)
            try:
                assert habit(sender) is KVPoll.Success, sender.failure()
            except AssertionError as error:
                failures.append((lane, turn, str(error)))
            sender.clear()

    def load(lane, habit):
        for turn in range(ROOMS):
            room, pages = lane * ROOMS + turn, [lane * 3 + 1, lane * 3 + 2]
            receiver = kit.claim(decode, prefill, room, pages, tag=room + 1)
            try:
                assert habit(receiver) is KVPoll.Success, receiver.failure()
                assert (decode.pages(pages) == rows[[lane * 3, lane * 3 + 1]]).all()
            except AssertionError as error:
                failures.append((lane, turn, str(error)))
            receiver.clear()

    threads = [threading.Thread(target=serve, args=each) for each in enumerate(HABITS)]
    threads += [threading.Thread(target=load, args=each) for each in enumerate(HABITS[1:] + HABITS[:1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []
    for side in (prefill, decode):
        assert side.manager.health() == ""
        kit.until(lambda: side.manager.node.book.idle)  # noqa: B023


def test_a_small_room_is_written_and_told_by_the_thread_that_sends_it(make, kit, monkeypatch):
    prefill, decode = make("prefill"), make("decode")
    warm = kit.claim(decode, prefill, 1, [1])
    kit.offer(prefill, 1, [1])
    assert warm.wait(5) is KVPoll.Success
    writers = []
    submit = prefill.engine.submit
    monkeypatch.setattr(prefill.engine, "submit", lambda *args: writers.append(threading.get_ident()) or submit(*args))
    for room in range(10, 30):
        receiver = kit.claim(decode, prefill, room, [3])
        sender = kit.offer(prefill, room, [5], send=False)
        kit.until(lambda: sender.poll() is KVPoll.WaitingForInput)  # noqa: B023
        sender.send(np.array([5], np.int32))
        assert receiver.wait(5) is KVPoll.Success
        sender.clear()
        receiver.clear()
    assert writers.count(threading.get_ident()) > len(writers) / 2, "another thread was at it more often than not"


def test_a_large_room_and_an_engine_bound_to_its_thread_are_left_to_the_mover(make, kit, monkeypatch):
    from kvferry.testing.faulty import Faulty

    monkeypatch.setattr(Faulty, "caps", property(lambda self: self.inner.caps & ~(Caps.BLOCKING | Caps.ANY_THREAD)))
    prefill, decode = make("prefill", "faulty"), make("decode", "faulty")
    writers = set()
    submit = prefill.engine.submit
    monkeypatch.setattr(prefill.engine, "submit", lambda *args: writers.add(threading.get_ident()) or submit(*args))
    for room in range(10):
        receiver = kit.claim(decode, prefill, room, [3])
        kit.offer(prefill, room, [5])
        assert receiver.wait(5) is KVPoll.Success
    assert writers == {prefill.manager.node.mover._thread.ident}


def test_no_turn_is_taken_while_bytes_are_copied(make, kit, monkeypatch):
    prefill, decode = make("prefill"), make("decode")
    held = []
    submit = prefill.engine.submit

    def slow(*args):
        held.append(prefill.manager.node.control._turn.is_taken)
        return submit(*args)

    monkeypatch.setattr(prefill.engine, "submit", slow)
    for room in range(20):
        receiver = kit.claim(decode, prefill, room, [3])
        kit.offer(prefill, room, [5])
        assert receiver.wait(5) is KVPoll.Success
    assert held.count(True) <= 2, "the control thread may be at work at that moment, this thread may not"


def test_a_scheduler_that_never_polls_and_never_waits_is_served_all_the_same(make, kit):
    prefill, decode = make("prefill"), make("decode")
    receiver = kit.claim(decode, prefill, 5, [3])
    kit.offer(prefill, 5, [4])
    kit.until(lambda: receiver._view.poll is KVPoll.Success)


@pytest.mark.parametrize("kind", [KVSender, KVReceiver])
def test_a_mistake_inside_a_turn_ends_the_node_and_is_not_raised_at_the_scheduler(make, kit, monkeypatch, kind):
    prefill, decode = make("prefill"), make("decode")
    receiver = kit.claim(decode, prefill, 5, [3])
    sender = kit.offer(prefill, 5, [4], send=False)
    kit.until(lambda: sender.poll() is KVPoll.WaitingForInput)
    side = prefill if kind is KVSender else decode
    monkeypatch.setattr(side.manager.node.control, "perform", lambda: 1 / 0)
    sender.send(np.array([4], np.int32))
    room = sender if kind is KVSender else receiver
    kit.until(lambda: room.poll() is KVPoll.Failed)
    assert "ZeroDivisionError" in side.manager.health()


def test_a_mistake_of_the_engine_glue_is_not_raised_at_the_scheduler(make, kit, monkeypatch):
    prefill, decode = make("prefill"), make("decode")
    receiver = kit.claim(decode, prefill, 5, [3])
    sender = kit.offer(prefill, 5, [4], send=False)
    kit.until(lambda: sender.poll() is KVPoll.WaitingForInput)
    monkeypatch.setattr(prefill.manager.node.mover, "_submit_some", lambda: 1 / 0)
    sender.send(np.array([4], np.int32))
    kit.until(lambda: sender.poll() is KVPoll.Failed)
    assert receiver.wait(5) is KVPoll.Failed
    assert "mover" in prefill.manager.health()


class Interrupt(BaseException):
    """What a signal handler of the application raises."""


def test_an_exception_of_a_signal_handler_in_a_turn_fails_the_rooms_by_name_and_nothing_hangs(make, kit, monkeypatch):
    prefill, decode = make("prefill"), make("decode")
    control, caller = prefill.manager.node.control, threading.get_ident()
    perform = control.perform

    def interrupted():
        if threading.get_ident() == caller:  # where signal handlers run
            raise Interrupt
        perform()

    for room in range(5, 25):
        receiver = kit.claim(decode, prefill, room, [3])
        sender = kit.offer(prefill, room, [4], send=False)
        kit.until(lambda sender=sender: sender.poll() is KVPoll.WaitingForInput)
        with monkeypatch.context() as patch, contextlib.suppress(Interrupt):
            patch.setattr(control, "perform", interrupted)
            sender.send(np.array([4], np.int32))
            assert receiver.wait(5) is KVPoll.Success, "another thread had the turn"
            continue
        break
    assert sender.wait(5) is KVPoll.Failed
    assert receiver.wait(5) is KVPoll.Failed
    assert "Interrupt" in prefill.manager.health()


@pytest.mark.parametrize("which", ["control", "mover"])
def test_a_turn_that_nobody_gives_back_is_taken_over(make, kit, which, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)
    prefill, decode = make("prefill"), make("decode")
    owner = getattr(prefill.manager.node, which)
    kit.until(owner._turn.try_take)  # and then a signal handler raises, before the `try`
    receiver = kit.claim(decode, prefill, 5, [3])
    sender = kit.offer(prefill, 5, [4])
    assert receiver.wait(5) is KVPoll.Success
    assert sender.wait(5) is KVPoll.Success
    kit.until(lambda: not owner._turn.is_taken)


def test_a_message_is_taken_after_the_calls_that_were_made_before_it_came(make, kit, monkeypatch):
    """A busy prefill rank finds a room, its claim and the claim's end at once: it fails for the claim's reason."""
    monkeypatch.setattr(turns, "PATIENCE_S", 60.0)
    prefill, decode = make("prefill"), make("decode")
    warm = kit.claim(decode, prefill, 1, [1])
    kit.offer(prefill, 1, [1])
    assert warm.wait(5) is KVPoll.Success
    control = prefill.manager.node.control
    kit.until(control._turn.try_take)
    try:
        sender = kit.offer(prefill, 2, [1], send=False)
        receiver = kit.claim(decode, prefill, 2, [2])
        kit.until(lambda: receiver.poll() is KVPoll.Transferring)
        receiver.abort("enough")
        time.sleep(0.2)  # all of it is at the socket
    finally:
        control._turn.give_back()
    assert sender.wait(5) is KVPoll.Failed
    assert "enough" in str(sender.failure())


def test_a_poll_that_finds_success_leaves_the_thanks_to_later_and_they_are_given_though_nothing_more_is_called(
    make, kit
):
    prefill, decode = make("prefill"), make("decode")
    owed = False
    for room in range(1, 21):
        receiver, sender = kit.claim(decode, prefill, room, [3]), kit.offer(prefill, room, [4])
        kit.until(lambda receiver=receiver: receiver.poll() is KVPoll.Success)
        owed = owed or decode.manager.node.control._performer.owes_thanks
        kit.until(lambda sender=sender: sender.claims_success() is True)
        assert not decode.manager.node.control._performer.owes_thanks
    assert owed
