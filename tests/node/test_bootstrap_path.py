"""Through the bootstrap server: what it does not do, or does badly, is bounded and said with its address."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from kvferry import KVArgs, KVBootstrapServer, KVManager, KVPoll, KVReceiver, KVSender
from kvferry.api import registrar
from kvferry.bootstrap import BootstrapClient, ConflictError, RankEntry, RefusedError
from kvferry.errors import AddressError, BootstrapError, Code
from kvferry.ids import Rank
from kvferry.presets import page_major


@pytest.fixture
def server():
    with KVBootstrapServer(port=0, ttl_s=0.9) as running:
        running.address = f"127.0.0.1:{running.port}"
        yield running


@contextlib.contextmanager
def fake_server(answer, *, stall_s=0.0, drip_s=0.0):
    """A server that gives every connection the same bytes."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def serve_one(connection):
            with connection, contextlib.suppress(OSError):
                connection.settimeout(1)
                connection.recv(65536)
                stop.wait(stall_s)
                for number in range(len(answer) if drip_s else 0):
                    connection.sendall(answer[number : number + 1])
                    if stop.wait(drip_s):
                        return
                connection.sendall(b"" if drip_s else answer)

        def serve():
            threads = []
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    threads.append(threading.Thread(target=serve_one, args=(connection,)))
                    threads[-1].start()
            for thread in threads:
                thread.join()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()


def http(status, body):
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body.encode()


def look_up(decode, address, room=5, dp=0, pages=(7, 3)):
    receiver = KVReceiver(decode.manager, address, room)
    receiver.init(dp)
    receiver.send_metadata(list(pages), 0)
    return receiver


def entry(rank, sizes, endpoint="tcp://127.0.0.1:9", incarnation=7):
    return RankEntry(rank, sizes, endpoint, "digest", incarnation, 0)


def hand_over(prefill, decode, kit, address, room, dp=0):
    rows = prefill.fill([1, 2], seed=room)
    receiver = look_up(decode, address, room, dp)
    kit.offer(prefill, room, [1, 2])
    assert receiver.wait(5) is KVPoll.Success, receiver.failure()
    assert (decode.pages([7, 3]) == rows).all()


ANSWERS = {
    "500": (http("500 Internal Server Error", '{"detail": "out of order"}'), "answered 500: .*out of order"),
    "404": (http("404 Not Found", "<html>nginx</html>"), "answered 404: .*nginx"),
    "garbage": (http("200 OK", "certainly!"), "answered 200, but not as expected"),
    "another JSON": (http("200 OK", '{"entries": "all"}'), "answered 200, but not as expected"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "no valid HTTP answer"),
    "nothing": (b"", "failed: remote end closed connection without response"),
    "half an answer": (http("200 OK", "x" * 500)[:-400], "(no valid HTTP answer|failed)"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_server_that_answers_badly_fails_the_room_with_what_it_said(make, kit, name):
    answer, words = ANSWERS[name]
    decode = make("decode")
    with fake_server(answer) as address:
        receiver = look_up(decode, address)
        assert receiver.wait(3) is KVPoll.Failed
    error = receiver.failure()
    assert error.reason.code is Code.NO_BOOTSTRAP
    with pytest.raises(type(error), match=f"http://{address}.*{words}"):
        receiver.failure_exception()
    assert receiver.is_release_safe()
    receiver.abort()
    assert receiver.poll() is KVPoll.Failed
    assert receiver.failure().reason == error.reason
    assert decode.manager.health() == ""


def test_a_server_that_stalls_or_drips_is_bounded(make):
    decode, answer = make("decode", bootstrap_timeout_s=20.0), http("200 OK", "{}")
    with fake_server(answer, stall_s=30) as stalling, fake_server(answer, drip_s=0.4) as dripping:
        begin = time.monotonic()
        rooms = {stalling: look_up(decode, stalling, 5), dripping: look_up(decode, dripping, 6, pages=[8])}
        for address, receiver in rooms.items():
            assert receiver.wait(6) is KVPoll.Failed
            words = f"http://{address}: GET /topology?dp=0 got no complete answer within 3.0 s"
            assert words in str(receiver.failure())
        assert time.monotonic() - begin < 4.5


def test_a_room_that_runs_out_of_time_before_the_server_does_says_so(make):
    decode = make("decode", bootstrap_timeout_s=0.5)
    with fake_server(b"", stall_s=30) as address:
        receiver = look_up(decode, address, 5)
        assert receiver.wait(3) is KVPoll.Failed
        assert "within 0.5 s: their addresses are still being looked up" in str(receiver.failure())


def test_a_stalled_server_does_not_hold_up_rooms_of_others(make, kit, server):
    prefill, decode = make("prefill", bootstrap_addr=server.address), make("decode")
    with fake_server(b"", stall_s=30) as address:
        stalled = [look_up(decode, address, room, dp=room % 20, pages=[]) for room in range(100, 140)]
        for room in stalled:
            room.clear()
        begin = time.monotonic()
        hand_over(prefill, decode, kit, server.address, room=5)
        direct = kit.claim(decode, prefill, 6, [9])
        kit.offer(prefill, 6, [1])
        assert direct.wait(2) is KVPoll.Success
        assert time.monotonic() - begin < 1.5


def test_rooms_that_ask_the_same_share_one_look_up(make, kit):
    decode = make("decode")
    asked = []

    def find():
        asked.append(1)
        time.sleep(0.2)
        raise BootstrapError("not there")

    from kvferry.node.claims import Target
    from kvferry.node.view import RoomView

    claims = decode.manager.node.claims
    views = [RoomView(number) for number in range(50)]
    for view in views:
        decode.manager.node.call(lambda view=view: claims.open(view, 0, Target(find, "same"), ""))
    assert [view.wait(3) for view in views] == [KVPoll.Failed] * 50
    assert len(asked) == 1


def test_no_server_at_all(make, kit):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    decode = make("decode", bootstrap_timeout_s=30.0)
    begin = time.monotonic()
    receiver = look_up(decode, f"127.0.0.1:{port}")
    assert receiver.wait(3) is KVPoll.Failed
    assert time.monotonic() - begin < 3
    assert f"http://127.0.0.1:{port}: GET /topology?dp=0 failed: connection refused" in str(receiver.failure())
    prefill = make("prefill", bootstrap_addr=f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}: PUT /register failed: connection refused" in prefill.manager.info()["bootstrap"]
    with KVBootstrapServer(port=port, ttl_s=0.9):
        kit.until(lambda: prefill.manager.info()["bootstrap"] == "registered")
        hand_over(prefill, decode, kit, f"127.0.0.1:{port}", room=6)


def test_missing_ranks_are_named(make, server):
    BootstrapClient(server.address).register(entry(Rank(tp=0), Rank(1, 1, 1, 2)))
    receiver = look_up(make("decode"), server.address)
    assert receiver.wait(3) is KVPoll.Failed
    assert f"{server.address}: dp0 pp0 cp0 tp1 of the prefill side not registered" in str(receiver.failure())


def test_nobody_has_registered(make, server):
    receiver = look_up(make("decode"), server.address, dp=None)
    assert receiver.wait(3) is KVPoll.Failed
    assert "all ranks of the prefill side not registered" in str(receiver.failure())


def test_a_dp_rank_that_does_not_exist(make, server):
    BootstrapClient(server.address).register(entry(Rank(), Rank(1, 1, 1, 1)))
    receiver = look_up(make("decode"), server.address, dp=3)
    assert receiver.wait(3) is KVPoll.Failed
    assert "DP rank 3 is not within 0 and 0" in str(receiver.failure())


def test_a_rank_that_is_held_by_a_live_process_is_refused(make, server):
    first = make("prefill", bootstrap_addr=server.address)
    begin = time.monotonic()
    with pytest.raises(ConflictError, match=r"can't have it while incarnation .* holds it.*configured alike"):
        make("prefill", bootstrap_addr=server.address)
    assert 0.5 < time.monotonic() - begin < 3
    assert first.manager.info()["bootstrap"] == "registered"
    assert not [each.name for each in threading.enumerate() if each.name == "kvferry-control"][1:]


def test_the_place_of_a_killed_rank_is_taken_when_its_entry_expires(make, kit, server):
    dead = entry(Rank(), Rank(1, 1, 1, 1), incarnation=99)
    BootstrapClient(server.address).register(dead)
    begin = time.monotonic()
    prefill, decode = make("prefill", bootstrap_addr=server.address), make("decode")
    assert time.monotonic() - begin < 2
    hand_over(prefill, decode, kit, server.address, room=5)


def test_other_refusals_are_raised_at_once(make, server):
    BootstrapClient(server.address).register(entry(Rank(), Rank(1, 1, 1, 1)))
    begin = time.monotonic()
    with pytest.raises(RefusedError, match="has sizes dp1 pp1 cp1 tp4, but the grid has dp1 pp1 cp1 tp1"):
        make("prefill", bootstrap_addr=server.address, sizes=Rank(1, 1, 1, 4))
    assert time.monotonic() - begin < 1


def test_a_missing_or_wrong_secret_is_said(make, kit):
    with KVBootstrapServer(port=0, secret="right") as server:
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(RefusedError, match=r"401 unauthorised.*needs the bearer token; the request has none"):
            make("prefill", bootstrap_addr=address)
        with pytest.raises(RefusedError, match="the request has another one"):
            make("prefill", bootstrap_addr=address, secret="wrong")
        receiver = look_up(make("decode"), address)
        assert receiver.wait(3) is KVPoll.Failed
        assert "give prefill, decode and bootstrap the same secret" in str(receiver.failure())
        prefill, decode = make("prefill", bootstrap_addr=address, secret="right"), make("decode", secret="right")
        hand_over(prefill, decode, kit, address, room=6)


@pytest.mark.parametrize("address", ["", "a:b", "http://", "https://127.0.0.1:1", "127.0.0.1:0", "[::1", "a b:1"])
def test_malformed_addresses_are_errors_of_the_constructors(make, address):
    with pytest.raises(AddressError, match="bootstrap address"):
        make("prefill", bootstrap_addr=address)
    prefill = make("prefill", sizes=Rank(2, 1, 1, 1))
    with pytest.raises(AddressError, match="bootstrap address"):
        KVSender(prefill.manager, address, 5)
    KVSender(prefill.manager, None, 5)  # the number was not lost


def test_entries_are_renewed_and_come_back_after_the_server_was_restarted(make, kit):
    with KVBootstrapServer(port=0, ttl_s=0.6) as server:
        port = server.port
        prefill, decode = make("prefill", bootstrap_addr=f"127.0.0.1:{port}"), make("decode")
        time.sleep(1.5)
        hand_over(prefill, decode, kit, f"127.0.0.1:{port}", room=5)
    kit.until(lambda: "connection refused" in prefill.manager.info()["bootstrap"])
    with KVBootstrapServer(port=port, ttl_s=0.6):
        kit.until(lambda: prefill.manager.info()["bootstrap"] == "registered", 2)
        hand_over(prefill, decode, kit, f"127.0.0.1:{port}", room=6)


def test_a_refused_renewal_is_shown_and_tried_again(make, kit):
    with KVBootstrapServer(port=0, ttl_s=0.6) as server:
        port = server.port
        prefill = make("prefill", bootstrap_addr=f"127.0.0.1:{port}")
    with KVBootstrapServer(port=port, ttl_s=0.6):
        with contextlib.suppress(ConflictError):  # whoever comes first
            BootstrapClient(f"127.0.0.1:{port}").register(entry(Rank(), Rank(1, 1, 1, 1), incarnation=99))
            kit.until(lambda: "holds it" in prefill.manager.info()["bootstrap"], 2)
        kit.until(lambda: prefill.manager.info()["bootstrap"] == "registered", 3)


def test_shutdown_takes_the_entry_back_at_once(make, kit, server):
    prefill, decode = make("prefill", bootstrap_addr=server.address), make("decode")
    prefill.manager.shutdown()
    receiver = look_up(decode, server.address)
    assert receiver.wait(3) is KVPoll.Failed
    assert "not registered" in str(receiver.failure())


def test_data_parallel_ranks_are_found_by_room_or_by_number(make, kit, server):
    layouts = [
        page_major("toy", layers=3, kv_heads=2, head_dim=8, dtype="float16", pages=32, page_tokens=16, rank=Rank(dp=dp))
        for dp in range(2)
    ]
    sizes = Rank(2, 1, 1, 1)
    ranks = [make("prefill", layout=layout, bootstrap_addr=server.address, sizes=sizes) for layout in layouts]
    decode = make("decode")
    for room in range(10, 16):
        side = ranks[room % 2]
        rows = side.fill([1, 2], seed=room)
        sender = KVSender(side.manager, server.address, room)
        sender.init(2, 0)
        sender.send([1, 2])
        if room < 13:
            kit.until(lambda room=room: BootstrapClient(server.address).query_rooms([room]))
        receiver = look_up(decode, server.address, room, dp=None if room < 13 else room % 2)
        assert receiver.wait(3) is KVPoll.Success, receiver.failure()
        assert (decode.pages([7, 3]) == rows).all()


def test_looking_up_many_rooms_leaves_nothing_behind(make, kit, server):
    prefill, decode = make("prefill", bootstrap_addr=server.address), make("decode")
    for room in range(1, 40):
        receiver, sender = look_up(decode, server.address, room, dp=None), kit.offer(prefill, room, [1, 2])
        assert receiver.wait(3) is KVPoll.Success
        sender.clear()
        receiver.clear()
    claims = decode.manager.node.claims
    assert len(claims._known) <= 1
    assert not claims._looking
    kit.until(lambda: not claims._pending and not decode.manager.node.book.claims)


def test_the_default_life_of_an_entry_is_the_same_everywhere():
    assert registrar.DEFAULT_TTL_S == 6.0
    layout = page_major("toy", layers=1, kv_heads=1, head_dim=8, dtype="float16", pages=4, page_tokens=16)
    with KVBootstrapServer(port=0) as server:
        args = KVArgs(layout, [np.zeros(2048, np.uint8)])
        with KVManager(args, "prefill", environ={}, bootstrap_addr=f"127.0.0.1:{server.port}") as manager:
            assert manager.registrar._ttl_s == 6.0
