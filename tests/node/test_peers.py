"""Peers that are killed, stopped, or leave: real processes. Suspicion fails rooms, only proof frees pages."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from engine_here import need
from kvferry import KVPoll, KVReceiver, KVSender
from kvferry.errors import Code, InputError
from kvferry.presets import page_major


def half(heads):
    return page_major(
        "toy", layers=3, kv_heads=2, head_dim=8, dtype="float16", pages=32, page_tokens=16, heads=tuple(heads)
    )


LOST_S = 2.0
"""heartbeat_timeout_s is 0.8 here; a killed process is noticed at once."""


def stays(condition, seconds=0.4):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert condition()
        time.sleep(0.01)


AUTO, TCP = ({"engine": "faulty", "engine_options": f"mechanism={name}"} for name in ("auto", "tcp"))
NIXL, NIXL_TCP = (
    {"engine": "faulty-nixl", "engine_options": f"param.engine_config=TLS={name}"} for name in ("all", "tcp")
)
BOTH = [AUTO, NIXL]


@pytest.fixture
def options(request):
    """An engine and its options, which has to be here."""
    if "nixl" in request.param["engine"]:
        need("nixl")
    return request.param


def in_point(point, worker, decode, kit):
    """A receiver whose room has come to that point at the prefill process."""
    if point == "held":
        worker.do("engine", call="hold")
    receiver = kit.claim(decode, worker, 1, [4, 5])
    if point != "before the offer":
        worker.do("offer", room=1, pages=[1, 2], seed=1, send=point != "before the pages")
    if point == "held":
        kit.until(lambda: worker.do("held"))
    elif point == "delivered":
        assert receiver.wait(3) is KVPoll.Success
    else:
        kit.until(lambda: receiver.poll() is KVPoll.Transferring)
    return receiver


@pytest.mark.parametrize(
    ("point", "options"),
    [
        *(("before the offer", AUTO), ("before the pages", AUTO), ("held", AUTO), ("held", TCP)),
        *(("before the offer", NIXL), ("before the pages", NIXL), ("held", NIXL), ("held", NIXL_TCP)),
    ],
    indirect=["options"],
)
def test_a_killed_prefill_process_fails_the_room_and_its_end_frees_the_pages(make, spawn, kit, options, point):
    worker, healthy = spawn("prefill", **options), make("prefill", options["engine"])
    decode = make("decode", **options)
    receiver = in_point(point, worker, decode, kit)
    rows = healthy.fill([7], seed=7)
    other = kit.claim(decode, healthy, 2, [9])
    worker.kill()
    assert receiver.wait(LOST_S) is KVPoll.Failed
    assert receiver.failure().reason.code is Code.PEER_LOST
    assert worker.manager.endpoint.removeprefix("tcp://") in str(receiver.failure())
    kit.until(receiver.is_release_safe, LOST_S)
    kit.offer(healthy, 2, [7])
    assert other.wait(3) is KVPoll.Success
    assert (decode.pages([9]) == rows).all()
    assert decode.manager.info()["counts"].get("quarantined", 0) == 0
    receiver.clear()
    other.clear()
    kit.until(lambda: decode.manager.node.book.idle and not decode.manager.node.views)
    assert len(decode.manager.node.grants) == 0


@pytest.mark.parametrize("options", [AUTO, TCP, NIXL, NIXL_TCP], indirect=True)
def test_a_prefill_process_that_is_killed_in_the_middle_leaves_the_rest_of_the_pages_untouched(
    make, spawn, kit, options
):
    worker, decode = spawn("prefill", batch_rows=1, batches_in_flight=1, **options), make("decode", **options)
    pages = list(range(0, 32, 2))
    worker.do("delay", seconds=0.03)
    receiver = kit.claim(decode, worker, 1, pages)
    worker.do("offer", room=1, pages=pages, seed=1)
    kit.until(lambda: (decode.pages(pages) != kit.SENTINEL).sum() > 0)
    worker.kill()
    assert receiver.wait(LOST_S) is KVPoll.Failed
    kit.until(receiver.is_release_safe, LOST_S)
    own = decode.fill(pages, seed=2)
    assert (decode.pages(range(1, 32, 2)) == kit.SENTINEL).all()
    time.sleep(0.2)
    assert (decode.pages(pages) == own).all()


def test_a_sibling_of_a_killed_source_still_holds_the_pages(make, spawn, kit):
    worker, source = spawn("prefill", heads=[0, 1]), make("prefill", "faulty", half((1, 2)))
    decode = make("decode", "faulty")
    worker.do("engine", call="hold")
    source.engine.hold()
    receiver = kit.claim(decode, [worker, source], 1, [4, 5])
    worker.do("offer", room=1, pages=[1, 2])
    sender = kit.offer(source, 1, [1, 2])
    kit.until(lambda: source.engine.held and worker.do("held"))
    worker.kill()
    assert receiver.wait(LOST_S) is KVPoll.Failed
    assert sender.wait(LOST_S) is KVPoll.Failed
    assert sender.failure().reason.code is Code.PEER_LOST
    assert sender.failure().reason.side == "decode"
    stays(lambda: not receiver.is_release_safe() and not sender.is_release_safe())
    source.engine.release()
    kit.until(lambda: receiver.is_release_safe() and sender.is_release_safe(), LOST_S)


def test_a_prefill_process_that_is_killed_after_it_delivered_changes_nothing(make, spawn, kit):
    worker, decode = spawn("prefill"), make("decode", "faulty")
    receiver = in_point("delivered", worker, decode, kit)
    worker.kill()
    stays(lambda: receiver.poll() is KVPoll.Success and receiver.is_release_safe())
    receiver.clear()
    kit.until(lambda: decode.manager.node.book.idle)


@pytest.mark.parametrize(
    ("point", "options"), [("no pages", AUTO), ("held", AUTO), ("held", TCP)], indirect=["options"]
)
def test_a_killed_decode_process_fails_the_room_and_frees_the_source_pages_after_the_write(
    make, spawn, kit, options, point
):
    worker, healthy = spawn("decode", **options), make("decode", "faulty")
    prefill = make("prefill", **options)
    prefill.engine.hold()
    sender = kit.offer(prefill, 1, [1, 2], send=point == "held")
    worker.do("claim", room=1, pages=[4, 5], endpoint=prefill.manager.endpoint)
    kit.until(lambda: prefill.engine.held or sender.poll() is KVPoll.WaitingForInput)
    worker.kill()
    assert sender.wait(LOST_S) is KVPoll.Failed
    assert sender.failure().reason.code is Code.PEER_LOST
    if point == "held":
        stays(lambda: not sender.is_release_safe())
    prefill.engine.release()
    kit.until(sender.is_release_safe, LOST_S)
    rows = prefill.fill([3], seed=3)
    receiver, again = kit.claim(healthy, prefill, 2, [9]), kit.offer(prefill, 2, [3])
    assert receiver.wait(3) is KVPoll.Success
    assert (healthy.pages([9]) == rows).all()
    for room in (sender, receiver, again):
        room.clear()
    kit.until(lambda: prefill.manager.node.book.idle)


@pytest.mark.parametrize("options", BOTH, indirect=True)
def test_a_stopped_prefill_process_is_suspected_and_its_pages_come_back_when_it_goes_on(make, spawn, kit, options):
    worker, decode, healthy = spawn("prefill", **options), make("decode", **options), make("prefill", **options)
    receiver = in_point("held", worker, decode, kit)
    worker.stop()
    assert receiver.wait(LOST_S) is KVPoll.Failed
    assert receiver.failure().reason.code is Code.PEER_LOST
    stays(lambda: not receiver.is_release_safe())
    other = kit.claim(decode, healthy, 2, [9])
    kit.offer(healthy, 2, [7])
    assert other.wait(1) is KVPoll.Success
    worker.go_on()
    worker.do("engine", call="release")
    kit.until(receiver.is_release_safe, 5.0)
    again = kit.claim(decode, worker, 3, [4])
    worker.do("offer", room=3, pages=[1], seed=1)
    assert again.wait(5) is KVPoll.Success, again.failure()


@pytest.mark.parametrize("options", BOTH, indirect=True)
def test_a_stopped_process_that_is_killed_is_proven_quiet_by_its_end(make, spawn, kit, options):
    worker, decode = spawn("prefill", **options), make("decode", drain_limit_s=0.3, **options)
    receiver = in_point("held", worker, decode, kit)
    worker.stop()
    assert receiver.wait(LOST_S) is KVPoll.Failed
    kit.until(lambda: decode.manager.info()["counts"].get("quarantined") == 1)
    stays(lambda: not receiver.is_release_safe())
    worker.kill()
    kit.until(receiver.is_release_safe, LOST_S)


def test_shutdown_does_not_wait_long_for_a_stopped_peer(make, spawn, kit):
    worker, decode = spawn("prefill"), make("decode", "faulty")
    receiver = in_point("held", worker, decode, kit)
    worker.stop()
    began = time.monotonic()
    decode.manager.shutdown()
    assert time.monotonic() - began < 3
    assert receiver.poll() is KVPoll.Failed
    assert not receiver.is_release_safe()


class Silent:
    """Keeps what an engine says about fences to itself, as one without the capability does."""

    def __init__(self, fence):
        self._fence = fence

    def __call__(self, peer, claim=None):
        return -self._fence(peer, claim)


def test_pages_come_back_by_the_word_of_the_next_connection_where_no_fence_proves_anything(
    make, spawn, kit, monkeypatch
):
    worker, decode = spawn("prefill"), make("decode", "faulty", drain_limit_s=0.3)
    monkeypatch.setattr(decode.engine, "fence", Silent(decode.engine.fence))
    receiver = in_point("held", worker, decode, kit)
    worker.stop()
    assert receiver.wait(LOST_S) is KVPoll.Failed
    kit.until(lambda: decode.manager.info()["counts"].get("quarantined") == 1)
    worker.go_on()
    kit.until(lambda: worker.do("look", room=1)["poll"] == "Failed")
    stays(lambda: not receiver.is_release_safe(), 2.2)
    worker.do("engine", call="release")
    kit.until(receiver.is_release_safe, 5.0)


def test_a_stopped_decode_process_is_suspected_and_both_sides_settle_when_it_goes_on(make, spawn, kit):
    prefill, worker = make("prefill", "faulty"), spawn("decode")
    prefill.engine.hold()
    sender = kit.offer(prefill, 1, [1, 2])
    worker.do("claim", room=1, pages=[4, 5], endpoint=prefill.manager.endpoint)
    kit.until(lambda: prefill.engine.held)
    worker.stop()
    assert sender.wait(LOST_S) is KVPoll.Failed
    assert not sender.is_release_safe()
    worker.go_on()
    kit.until(lambda: worker.do("look", room=1)["poll"] == "Failed")
    prefill.engine.release()
    kit.until(sender.is_release_safe, LOST_S)
    kit.until(lambda: worker.do("look", room=1)["safe"], 5.0)
    sender.clear()
    worker.do("clear", room=1)
    kit.until(lambda: prefill.manager.node.book.idle)


def test_calls_to_a_stopped_peer_never_wait_and_other_rooms_keep_their_pace(make, spawn, kit):
    worker, decode, healthy = spawn("prefill"), make("decode", "faulty"), make("prefill", "faulty")
    warm = kit.claim(decode, worker, 0, [0])
    worker.do("offer", room=0, pages=[0])
    assert warm.wait(3) is KVPoll.Success
    worker.stop()
    seconds, receivers = [], []
    for room in range(1, 500):
        began = time.monotonic()
        receivers.append(kit.claim(decode, worker, room, []))
        seconds.append(time.monotonic() - began)
        if room % 50 == 0:
            other = kit.claim(decode, healthy, 1000 + room, [9])
            kit.offer(healthy, 1000 + room, [7])
            assert other.wait(2) is KVPoll.Success
    assert sorted(seconds)[-5] < 0.1  # the machine itself may take a pause
    for receiver in receivers:
        assert receiver.wait(8) is KVPoll.Failed


# -- leaving


def test_shutdown_with_time_to_drain_lets_rooms_finish_and_refuses_new_ones(make, kit):
    prefill, decode = make("prefill", "faulty"), make("decode", "faulty")
    rows = prefill.fill(list(range(20)), seed=1)
    prefill.engine.hold()
    receivers = [kit.claim(decode, prefill, room, [room]) for room in range(20)]
    senders = [kit.offer(prefill, room, [room]) for room in range(20)]
    kit.until(lambda: prefill.engine.held)
    leaving = threading.Thread(target=prefill.manager.shutdown, kwargs={"drain_s": 5.0})
    leaving.start()
    kit.until(lambda: prefill.manager._draining)
    with pytest.raises(InputError, match="draining"):
        KVSender(prefill.manager, None, 99)
    time.sleep(0.2)
    prefill.engine.release()
    leaving.join(4)
    assert not leaving.is_alive()
    assert {room.wait(1) for room in receivers + senders} == {KVPoll.Success}
    assert (decode.pages(range(20)) == rows).all()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_shutdown_fails_what_still_runs_on_both_sides_with_the_reason(make, kit, who):
    prefill, decode = make("prefill", "faulty"), make("decode", "faulty")
    prefill.engine.hold()
    receivers = [kit.claim(decode, prefill, room, [room]) for room in range(4)]
    senders = [kit.offer(prefill, room, [room], send=room < 3) for room in range(3)]
    kit.until(lambda: prefill.engine.held)
    kit.until(lambda: all(room.poll() is KVPoll.Transferring for room in receivers))
    began = time.monotonic()
    (prefill if who == "prefill" else decode).manager.shutdown(drain_s=0.2)
    assert time.monotonic() - began < 3
    for room in receivers + senders:
        assert room.wait(1) is KVPoll.Failed
        assert room.failure().reason.code is Code.SHUTDOWN, room.failure()
        assert room.failure().reason.side == who


def test_a_decode_rank_that_leaves_gets_its_pages_back_where_nothing_was_being_written(make, kit):
    prefill, decode = make("prefill", "faulty"), make("decode", "faulty")
    receivers = [kit.claim(decode, prefill, room, [room]) for room in range(4)]
    senders = [kit.offer(prefill, room, [room], send=False) for room in range(4)]
    kit.until(lambda: all(room.poll() is KVPoll.WaitingForInput for room in senders))
    decode.manager.shutdown()
    assert all(room.is_release_safe() for room in receivers)
    kit.until(lambda: all(room.is_release_safe() for room in senders), 1.0)


def test_a_room_that_is_begun_while_the_manager_leaves_ends(make, kit):
    decode = make("decode", "faulty")
    receiver = KVReceiver(decode.manager, None, 1, peers=["127.0.0.1:1"])
    decode.manager.shutdown()
    receiver.init()
    receiver.send_metadata(np.array([1]))
    assert receiver.wait(1) is KVPoll.Failed
    assert receiver.failure().reason.code is Code.SHUTDOWN
    receiver.clear()


def test_rooms_that_are_begun_in_the_very_moment_of_shutdown_all_end(make, kit):
    prefill = make("prefill", "faulty")
    rooms, started = [], threading.Event()

    def begin():
        for room in range(100_000):
            try:
                rooms.append(KVSender(prefill.manager, None, room))
            except InputError:
                return
            started.set()

    thread = threading.Thread(target=begin)
    thread.start()
    started.wait(5)
    prefill.manager.shutdown()
    thread.join(5)
    assert rooms
    assert {room.wait(1) for room in rooms} == {KVPoll.Failed}


def test_a_process_that_ends_without_a_shutdown_says_goodbye_all_the_same(make, spawn, kit):
    decode, codes = make("decode"), []
    for room in range(3):  # on a busy machine 0.2 s may be too short for the word to leave
        prefill = spawn("prefill", "local")
        receiver = kit.claim(decode, prefill, room, [4 + room])
        prefill.do("offer", room=room, pages=[1], send=False)
        kit.until(lambda: any(each["ready"] for each in decode.manager.info()["peers"]))
        prefill.process.stdin.write(b'{"do": "end", "code": 3}\n')
        prefill.process.stdin.flush()
        assert receiver.wait(10) is KVPoll.Failed
        codes.append(receiver.failure().reason.code)
        assert prefill.process.wait(20) == 3
        if codes[-1] is Code.SHUTDOWN:
            break
    assert Code.SHUTDOWN in codes, codes


@pytest.mark.parametrize("engine", ["local", "nixl", "mooncake"])
def test_a_process_that_ends_while_it_writes_ends_with_its_own_code(engine):
    """A thread that is inside of a C++ library when the interpreter ends would abort the process."""
    need(engine)
    code = """
import sys, time
from conftest import Side, claim, offer, until
from kvferry.node.view import TERMINAL
from kvferry.presets import page_major
layout = page_major("big", layers=8, kv_heads=8, head_dim=128, dtype="float16", pages=32, page_tokens=64)
prefill, decode = Side("prefill", sys.argv[1], layout), Side("decode", sys.argv[1], layout)
rooms = [claim(decode, prefill, 1, range(30)), offer(prefill, 1, range(30))]
until(lambda: rooms[1].poll().name == "Transferring" or rooms[1].poll() in TERMINAL)
time.sleep(0.005)
sys.exit(3)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))}
    command = [sys.executable, "-c", code, engine]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert ended.returncode == 3, ended.stderr[-2000:]
