"""Threads: waiting and descriptors, and what is said when one of ours dies."""

import os
import select
import threading
import time

import pytest

from kvferry import KVPoll, KVSender
from kvferry.errors import Code, ProtocolError
from kvferry.ids import KVPoll as Poll
from kvferry.node import view as view_module
from kvferry.node.view import RoomView

# -- waiting


def test_every_thread_that_waits_for_a_room_wakes_when_it_ends(pair, kit):
    sender = kit.offer(pair[0], 1, [1])
    waited = []

    def wait():
        began = time.monotonic()
        waited.append((sender.wait(10), time.monotonic() - began))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    sender.abort()
    for thread in threads:
        thread.join(3)
    assert [poll for poll, _ in waited] == [KVPoll.Failed] * 3
    assert all(seconds < 2 for _, seconds in waited)


def test_a_wait_that_runs_out_returns_the_state_of_then(pair, kit):
    sender = kit.offer(pair[0], 1, [1])
    began = time.monotonic()
    assert sender.wait(0.1) is KVPoll.Bootstrapping
    assert 0.09 < time.monotonic() - began < 1
    assert sender.wait(0) is KVPoll.Bootstrapping


def test_the_descriptor_is_readable_after_each_change(pair, kit):
    prefill, decode = pair
    prefill.engine.hold()
    receiver = kit.claim(decode, prefill, 1, [4])
    fd = receiver.fileno()
    assert receiver.fileno() == fd
    assert select.select([receiver], [], [], 1)[0] == [receiver]
    os.eventfd_read(fd)
    sender = kit.offer(prefill, 1, [1])
    kit.until(lambda: prefill.engine.held)
    while select.select([fd], [], [], 0.3)[0]:
        os.eventfd_read(fd)
    assert receiver.poll() is KVPoll.Transferring
    prefill.engine.release()
    assert select.select([fd], [], [], 3)[0] == [fd]
    kit.until(lambda: receiver.poll() is KVPoll.Success)
    receiver.clear()
    sender.clear()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ProtocolError, match="after clear"):
        receiver.fileno()


def test_a_descriptor_can_wait_for_the_release_of_the_pages_as_well(pair, kit):
    prefill, decode = pair
    prefill.engine.hold()
    receiver = kit.claim(decode, prefill, 1, [4])
    kit.offer(prefill, 1, [1])
    kit.until(lambda: prefill.engine.held)
    receiver.abort()
    assert receiver.wait(2) is KVPoll.Failed
    while select.select([receiver], [], [], 0.3)[0]:
        os.eventfd_read(receiver.fileno())
    assert not receiver.is_release_safe()
    prefill.engine.release()
    assert select.select([receiver], [], [], 3)[0]
    kit.until(receiver.is_release_safe)


def test_a_descriptor_is_not_closed_while_a_change_is_written_to_it(monkeypatch):
    """Closed in between, its number could be another file's by the time that the control thread writes."""
    view = RoomView(1)
    fd = view.fileno()
    writing, go_on = threading.Event(), threading.Event()

    def slow(descriptor, _):
        writing.set()
        go_on.wait(5)
        os.fstat(descriptor)

    monkeypatch.setattr(view_module.os, "eventfd_write", slow)
    announcer = threading.Thread(target=lambda: view.update(Poll.Transferring, None, foreign=False, bytes_landed=0))
    announcer.start()
    writing.wait(5)
    closer = threading.Thread(target=view.close)
    closer.start()
    time.sleep(0.05)
    os.fstat(fd)
    go_on.set()
    announcer.join(5)
    closer.join(5)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# -- a thread of ours dies


def die(*_):
    raise MemoryError("on purpose")


def idents(side):
    return side.manager.node.control.thread.ident, side.manager.node.mover._thread.ident


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_dead_control_thread_is_named_and_fails_the_rooms_of_both_sides(pair, kit, who, monkeypatch):
    prefill, decode = pair
    mine = prefill if who == "prefill" else decode
    prefill.engine.hold()
    receiver, sender = kit.claim(decode, prefill, 1, [4]), kit.offer(prefill, 1, [1])
    kit.until(lambda: prefill.engine.held)
    monkeypatch.setattr(mine.manager.node.book, "on_tick", die)
    kit.until(lambda: "control thread" in mine.manager.health(), 1.0)
    assert "on purpose" in mine.manager.health()
    own, other = (sender, receiver) if who == "prefill" else (receiver, sender)
    assert own.wait(1) is KVPoll.Failed
    assert own.failure().reason.code is Code.INTERNAL
    assert other.wait(2) is KVPoll.Failed
    assert not sender.is_release_safe()
    late = KVSender(prefill.manager, None, 2) if who == "prefill" else kit.claim(decode, prefill, 2, [5])
    assert late.wait(1) is KVPoll.Failed
    assert "on purpose" in str(late.failure())
    healthy = decode if who == "prefill" else prefill
    assert healthy.manager.health() == ""
    assert isinstance(mine.manager.info()["health"], str)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_dead_mover_is_named_and_fails_the_rooms_of_both_sides(pair, kit, who, monkeypatch):
    prefill, decode = pair
    mine = prefill if who == "prefill" else decode
    prefill.engine.hold()
    receiver, sender = kit.claim(decode, prefill, 1, [4]), kit.offer(prefill, 1, [1])
    kit.until(lambda: prefill.engine.held)
    monkeypatch.setattr(mine.engine, "poll", die)
    kit.until(lambda: "mover" in mine.manager.health(), 2.0)
    assert "on purpose" in mine.manager.health()
    for room in (sender, receiver):
        assert room.wait(2) is KVPoll.Failed
        assert room.failure().reason.code is Code.INTERNAL
        assert "on purpose" in str(room.failure())
        assert room.failure().reason.side == who
    late, later = kit.claim(decode, prefill, 2, [5]), kit.offer(prefill, 2, [1])
    assert late.wait(1) is KVPoll.Failed
    assert later.wait(4) is KVPoll.Failed


def test_health_is_good_while_a_transfer_is_busy(make, kit):
    prefill, decode = make("prefill", "faulty", batch_rows=1), make("decode", "faulty")
    prefill.engine.delay_s = 0.02
    pages = list(range(0, 32, 2))
    receiver = kit.claim(decode, prefill, 1, pages)
    kit.offer(prefill, 1, pages)
    while receiver.poll() is not KVPoll.Success:
        assert prefill.manager.health() == decode.manager.health() == ""
        assert receiver.poll() is not KVPoll.Failed
        time.sleep(0.01)


def test_info_may_be_asked_for_on_any_thread_at_any_time(pair, kit, make):
    prefill = pair[0]
    stop, problems = threading.Event(), []

    def ask():
        while not stop.is_set():
            try:
                for side in pair:
                    side.manager.info()
                    side.manager.health()
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for room in range(6):
            third = make("decode", "faulty")
            receiver = kit.claim(third, prefill, room, [1])
            kit.offer(prefill, room, [1])
            assert receiver.wait(5) is KVPoll.Success
            third.manager.shutdown()
    finally:
        stop.set()
        for thread in threads:
            thread.join(5)
    assert problems == []


def test_after_shutdown_calls_answer_and_say_so(make, kit):
    prefill = make("prefill", "faulty")
    sender = kit.offer(prefill, 1, [1])
    threads = [threading.Thread(target=prefill.manager.shutdown) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sender.poll() is KVPoll.Failed
    sender.abort()
    sender.clear()
    assert "shut down" in prefill.manager.health()
    assert prefill.manager.info()["health"]
