"""A part of a node fails in an odd moment: what depends on it is told by name, all else goes on."""

import contextlib
import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest

from kvferry import KVArgs, KVPoll, KVReceiver
from kvferry.engines.seam import Done, Outcome
from kvferry.errors import EngineError
from kvferry.ids import PeerId
from kvferry.node import digests, links
from kvferry.node.claims import Target
from kvferry.node.resolver import Resolver

LIMIT_S = 10.0


class Alarm(BaseException):
    """What a signal handler of the application raises."""


@pytest.fixture
def alarm():
    def handler(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_signal_handler_that_raises_in_a_digest_fails_its_room_and_holds_no_page(make, kit, monkeypatch, alarm, side):
    prefill, decode = make("prefill"), make("decode")
    prefill.fill([1], seed=1)
    armed, real = [side == "prefill"], digests.read_few

    def read_few(*arguments):
        if armed[0] and threading.current_thread() is threading.main_thread():
            armed[0] = False
            signal.raise_signal(signal.SIGALRM)
        return real(*arguments)

    monkeypatch.setattr(digests, "read_few", read_few)
    receiver, sender = kit.claim(decode, prefill, 5, [3]), kit.offer(prefill, 5, [1], send=False)
    kit.until(lambda: sender.poll() is KVPoll.WaitingForInput)
    if side == "prefill":
        with contextlib.suppress(Alarm):  # another thread may have taken the digest
            sender.send([1])
    else:
        armed[0] = True
        thread = threading.Thread(target=sender.send, args=([1],))
        thread.start()
        try:
            kit.until(lambda: receiver.poll() in {KVPoll.Success, KVPoll.Failed})
        except Alarm:
            assert receiver.wait(LIMIT_S) is KVPoll.Failed
        armed[0] = False
        thread.join()
    for room in (receiver, sender):
        assert room.wait(LIMIT_S) in {KVPoll.Success, KVPoll.Failed}
        kit.until(room.is_release_safe, LIMIT_S)


def test_an_interrupted_digest_is_told_and_the_exception_goes_on(make, monkeypatch):
    told, node = [], make("prefill").manager.node
    monkeypatch.setattr(node.digests, "help", lambda: None)

    def interrupted():
        raise Alarm

    node.digests._post(8, interrupted, told.append)
    with pytest.raises(Alarm):
        node.digests._small.popleft()()
    assert told == ["the digest was interrupted: Alarm"]


def test_where_no_thread_is_to_be_had_for_a_look_up_the_room_fails_and_the_next_one_does_not(make, kit, monkeypatch):
    prefill, decode = make("prefill"), make("decode")
    start = threading.Thread.start

    def refused(thread):
        if thread.name.startswith("kvferry-dialler"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    receiver = kit.claim(decode, prefill, 5, [3])
    assert receiver.wait(LIMIT_S) is KVPoll.Failed
    assert "can't start new thread" in str(receiver.failure())
    monkeypatch.undo()
    kit.offer(prefill, 6, [1])
    assert kit.claim(decode, prefill, 6, [4]).wait(LIMIT_S) is KVPoll.Success
    assert decode.manager.health() == ""


def test_what_a_resolver_was_refused_and_did_all_the_same_is_said_once():
    resolver, said = Resolver(), []
    submit = resolver._look_ups.submit

    def refused(task):
        submit(task)
        raise RuntimeError("can't start new thread")

    resolver._look_ups.submit = refused
    resolver.run(lambda: "found", said.append)
    resolver.close()
    assert len(said) == 1


def test_rooms_that_ask_a_hanging_server_hold_up_no_room_that_only_needs_a_connection(make, kit):
    prefill, decode = make("prefill"), make("decode", bootstrap_timeout_s=LIMIT_S)
    with socket.create_server(("127.0.0.1", 0), backlog=500) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        asking = [KVReceiver(decode.manager, address, 1000 + number) for number in range(150)]
        for room in asking:
            room.init()
        kit.offer(prefill, 5, [1])
        begun = time.monotonic()
        assert kit.claim(decode, prefill, 5, [3]).wait(LIMIT_S) is KVPoll.Success
        assert time.monotonic() - begun < 2.0  # one look-up takes 3 s
        for room in asking:
            room.abort()
            room.clear()
    begun = time.monotonic()
    decode.manager.shutdown()
    assert time.monotonic() - begun < 8.0  # those that have begun, not all after each other


def test_who_joins_a_look_up_that_nobody_waited_for_any_more_is_looked_up_for(make, kit, monkeypatch):
    prefill, decode = make("prefill"), make("decode")
    claims, given = decode.manager.node.claims, []
    monkeypatch.setattr(decode.manager.node.resolver, "run", lambda call, done: given.append((call, done)))
    target = Target(lambda: [prefill.manager.endpoint], key="same")
    monkeypatch.setattr(KVReceiver, "_target", lambda *_: target)
    first, second = (KVReceiver(decode.manager, "127.0.0.1:1", room) for room in (5, 6))
    first.init()
    kit.until(lambda: given)
    first.abort()
    first.clear()
    kit.until(lambda: not any(map(claims._waits, range(10))))
    (call, done) = given.pop()
    assert call() is None
    second.init()
    second.send_metadata([3])
    kit.until(lambda: len(claims._looking["same"]) == 2)
    done(None)
    kit.until(lambda: given)
    (call, done) = given.pop()
    done(call())
    kit.offer(prefill, 6, [1])
    assert second.wait(LIMIT_S) is KVPoll.Success, second.failure()


def test_a_small_room_waits_until_a_peer_to_whom_a_write_failed_is_connected_anew(make, kit):
    prefill, decode = make("prefill", "faulty"), make("decode", "faulty")
    rows = prefill.fill([1], seed=1)
    kit.offer(prefill, 1, [1])
    assert kit.claim(decode, prefill, 1, [3]).wait(LIMIT_S) is KVPoll.Success
    mover = prefill.manager.node.mover
    (peer,) = mover._blobs
    mover._turn.take()  # the thread has not come to it yet
    try:
        mover._doubted.add(peer)
        receiver = kit.claim(decode, prefill, 2, [4])
        sender = kit.offer(prefill, 2, [1])
        time.sleep(0.1)
        assert sender.poll() is not KVPoll.Failed
        assert mover._pause_s() == 0.0
    finally:
        mover._turn.give_back()
    mover._bell.put(None)
    assert receiver.wait(LIMIT_S) is KVPoll.Success, receiver.failure()
    assert (decode.pages([4]) == rows).all()


def test_a_late_answer_to_an_attachment_that_was_left_is_nobody_s(make, kit):
    prefill = make("prefill", "faulty")
    told, mover, peer = [], prefill.manager.node.mover, PeerId(5, 1)
    mover._reports = replace(mover._reports, attached=lambda *words: told.append(words))
    answers = []
    prefill.engine.attach = lambda name, blob: 77
    real, prefill.engine.poll = prefill.engine.poll, lambda budget_s: [answers.pop()] if answers else real(0.0)
    mover.attach(peer, b"")
    kit.until(lambda: mover._attaching)
    mover.detach(peer)
    kit.until(lambda: not mover._attaching)
    answers.append(Done(77, Outcome.FAILED_QUIET, "too late"))
    mover._post(lambda: None)
    kit.until(lambda: not answers)
    assert told == []


def test_a_node_whose_mover_has_died_refuses_a_new_peer_in_words(make, kit, monkeypatch):
    prefill, decode = make("prefill"), make("decode")
    monkeypatch.setattr(prefill.engine, "poll", lambda budget_s: 1 / 0)
    kit.until(prefill.manager.health, LIMIT_S)
    prefill.engine.personal = lambda blob, epoch: (_ for _ in ()).throw(EngineError("not open"))
    receiver = kit.claim(decode, prefill, 5, [3])
    assert receiver.wait(LIMIT_S) is KVPoll.Failed
    assert "the mover thread of engine local died" in str(receiver.failure())
    assert prefill.manager.node.control.thread.is_alive()


@pytest.mark.parametrize("who", ["control", "mover"])
def test_update_buffers_does_not_wait_for_a_thread_that_has_died(make, kit, monkeypatch, who):
    side = make("prefill")
    node = side.manager.node
    if who == "control":
        node.control.call(lambda: 1 / 0)
        kit.until(lambda: not node.control.thread.is_alive(), LIMIT_S)
    else:
        monkeypatch.setattr(side.engine, "poll", lambda budget_s: 1 / 0)
        kit.until(lambda: not node.mover.alive, LIMIT_S)
    begun = time.monotonic()
    with pytest.raises(EngineError, match="ended"):
        side.manager.update_buffers(KVArgs(side.layout, [side.pool], [side.aux]))
    assert time.monotonic() - begun < 5.0  # of 30 and 60 s


def test_a_signal_handler_may_shut_a_node_down_in_the_middle_of_a_wake_up(make, monkeypatch):
    side = make("decode")
    done = []

    def handler(*_):
        side.manager.shutdown()
        done.append(True)

    before = signal.signal(signal.SIGUSR2, handler)
    real = os.eventfd_write

    def eventfd_write(*arguments):
        if not done and threading.current_thread() is threading.main_thread():
            monkeypatch.setattr(links.os, "eventfd_write", real)
            signal.raise_signal(signal.SIGUSR2)
        else:
            real(*arguments)

    monkeypatch.setattr(links.os, "eventfd_write", eventfd_write)
    try:
        side.manager.node.links.wake()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert done
