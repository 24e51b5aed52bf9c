"""Ports, names, IPv4 and IPv6: found at the start, or said in words that name host and port."""

import contextlib
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry import KVPoll, KVReceiver
from kvferry.errors import AddressError, Code, ConfigError
from kvferry.ids import PeerId
from kvferry.node import links

sys.path.insert(0, str(Path(__file__).parent))

from peer_wire import tcp_address


@contextlib.contextmanager
def taken_ports(count=1):
    """Consecutive ports that somebody else listens on."""
    for start in range(21000, 60000, 97):
        sockets = []
        try:
            sockets.extend(socket.create_server(("127.0.0.1", port)) for port in range(start, start + count))
        except OSError:
            for each in sockets:
                each.close()
            continue
        try:
            yield list(range(start, start + count))
        finally:
            for each in sockets:
                each.close()
        return
    raise AssertionError("no free ports")


def hand_over(prefill, decode, kit, address, room=5):
    rows = prefill.fill([1, 2], seed=room)
    receiver = KVReceiver(decode.manager, None, room, peers=[address])
    receiver.init()
    receiver.send_metadata([7, 3], 0)
    kit.offer(prefill, room, [1, 2])
    assert receiver.wait(5) is KVPoll.Success, receiver.failure()
    assert (decode.pages([7, 3]) == rows).all()


@pytest.mark.parametrize("setting", ["control_ports", "data_ports"])
def test_a_port_in_use_is_an_error_of_the_constructor(make, setting):
    with taken_ports() as [port]:
        with pytest.raises(AddressError, match=rf"127\.0\.0\.1 .*{port}.*[Aa]ddress already in use") as caught:
            make("prefill", **{setting: str(port)})
        assert setting in str(caught.value)
        assert isinstance(caught.value, OSError)


def test_a_range_goes_on_past_ports_in_use_and_says_when_it_is_full(make):
    with taken_ports(2) as ports:
        first, last = ports[0], ports[-1] + 2
        sides = [make("decode", control_ports=f"{first}-{last}") for _ in range(2)]
        assert sorted(tcp_address(side.manager.endpoint)[1] for side in sides) == [last - 1, last]
        with pytest.raises(AddressError, match=f"port {first}-{last}"):
            make("decode", control_ports=f"{first}-{last}")


def test_port_0_is_a_real_port_that_answers(make):
    host, port = tcp_address(make("prefill").manager.endpoint)
    assert host == "127.0.0.1"
    assert port > 1023
    socket.create_connection((host, port), 1).close()


@pytest.mark.parametrize("mechanism", ["cma", "tcp"])
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_everything_over_ipv6(make, kit, host, mechanism):
    sides = [make(side, bind_host=host, engine_options=f"mechanism={mechanism}") for side in ("prefill", "decode")]
    port = tcp_address(sides[0].manager.endpoint)[1]
    assert sides[0].manager.endpoint == f"tcp://[::1]:{port}"
    hand_over(*sides, kit, f"[::1]:{port}")
    explained = sides[0].manager.info()["engine_info"]["peers"]
    assert mechanism in str(explained)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)


@pytest.mark.parametrize("mechanism", ["auto", "tcp"])
def test_one_address_is_bound_and_another_one_is_told(make, kit, mechanism):
    more = {"bind_host": "0.0.0.0", "insecure": True, "engine_options": f"mechanism={mechanism}"}
    prefill = make("prefill", advertise_host="127.0.0.3", **more)
    decode = make("decode", advertise_host="127.0.0.2", **more)
    assert prefill.manager.endpoint.startswith("tcp://127.0.0.3:")
    assert decode.engine.describe().count(b"127.0.0.2") == 1
    assert b"0.0.0.0" not in decode.engine.describe()
    hand_over(prefill, decode, kit, prefill.manager.endpoint)


def test_bound_and_told_addresses_may_be_names(make, kit):
    prefill, decode = make("prefill", bind_host="localhost"), make("decode", advertise_host="localhost")
    port = tcp_address(prefill.manager.endpoint)[1]
    assert prefill.manager.endpoint == f"tcp://localhost:{port}"
    hand_over(prefill, decode, kit, f"localhost:{port}")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "::1234", "fe80::1"])
def test_an_address_that_others_reach_needs_insecure(make, host):
    with pytest.raises(ConfigError, match=r"is not loopback.*pass insecure=True \(--insecure\)"):
        make("prefill", bind_host=host)


@pytest.mark.parametrize("host", ["127.0.0.1.example.invalid", "localhost.invalid", "a" * 70, "..", "no host"])
def test_a_name_is_loopback_by_its_address_only(make, host):
    with pytest.raises(AddressError, match=r"bind_host .* does not resolve"):
        make("prefill", bind_host=host)


@pytest.mark.parametrize(("told", "words"), [("0.0.0.0", "advertise_host '0.0.0.0'"), ("", "bind_host '::'")])
def test_nobody_is_told_a_wildcard(make, told, words):
    with pytest.raises(ConfigError, match=f"{words} is a wildcard: no peer can connect to it"):
        make("prefill", bind_host="::", insecure=True, advertise_host=told)


def test_an_address_of_another_host_can_not_be_bound(make):
    with pytest.raises(AddressError, match=r"192\.0\.2\.7"):
        make("prefill", bind_host="192.0.2.7", insecure=True)


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_closed_port_is_said_within_seconds(make):
    decode, port = make("decode", bootstrap_timeout_s=30.0), closed_port()
    begin = time.monotonic()
    receiver = KVReceiver(decode.manager, None, 5, peers=[f"127.0.0.1:{port}"])
    receiver.init()
    assert receiver.wait(3) is KVPoll.Failed
    assert time.monotonic() - begin < 3
    error = receiver.failure()
    assert error.reason.code is Code.UNREACHABLE
    assert f"127.0.0.1:{port} can't be reached: Connection refused" in str(error)


@pytest.mark.parametrize(
    "host", ["no-such-host.invalid", "a" * 70, "..", "exa mple", "a;b", "*.invalid", "\u00fc.invalid", "[::1%nowhere]"]
)
def test_hosts_that_are_none_fail_their_room_only(make, kit, host):
    prefill, decode = make("prefill"), make("decode")
    receiver = KVReceiver(decode.manager, None, 5, peers=[f"{host}:5000"])
    receiver.init()
    assert receiver.wait(3) is KVPoll.Failed
    assert "5000 can't be reached" in str(receiver.failure())
    hand_over(prefill, decode, kit, prefill.manager.endpoint, room=6)
    assert decode.manager.health() == ""


def test_an_address_that_libzmq_does_not_take_fails_its_room_only(make, kit, monkeypatch):
    prefill, decode = make("prefill"), make("decode")
    monkeypatch.setattr("kvferry.node.resolver.check_reachable", lambda address: "tcp://no good:1")
    receiver = kit.claim(decode, prefill, 5, [1])
    assert receiver.wait(3) is KVPoll.Failed
    assert "Invalid argument" in str(receiver.failure())
    monkeypatch.undo()
    hand_over(prefill, decode, kit, prefill.manager.endpoint, room=6)


def test_a_port_where_somebody_else_listens_is_given_up_in_time(make, kit):
    decode = make("decode", bootstrap_timeout_s=1.0)
    with taken_ports() as [port]:
        receiver = KVReceiver(decode.manager, None, 5, peers=[f"127.0.0.1:{port}"])
        receiver.init()
        assert receiver.wait(3) is KVPoll.Failed
        assert f"127.0.0.1:{port}" in str(receiver.failure())
        assert "nothing was heard: it is no kvferry rank" in str(receiver.failure())


def test_a_room_that_runs_out_of_time_before_its_handshakes_do_says_which_ranks_it_waited_for(make, kit, monkeypatch):
    prefill, decode = make("prefill"), make("decode", bootstrap_timeout_s=0.5)
    hand_over(prefill, decode, kit, prefill.manager.endpoint, room=4)
    monkeypatch.setattr(decode.manager.node.control.board, "tick", lambda now: None)
    with taken_ports(4) as ports:
        silent = [f"tcp://127.0.0.1:{port}" for port in ports]
        receiver = KVReceiver(decode.manager, None, 5, peers=[prefill.manager.endpoint, *silent])
        receiver.init()
        assert receiver.wait(5) is KVPoll.Failed
    words = str(receiver.failure())
    assert receiver.failure().reason.code is Code.BOOTSTRAP_TIMEOUT
    assert "within 0.5 s: 4 of 5 are missing; " in words
    assert all(f"{address}: nothing was heard" in words for address in silent[:3])
    assert prefill.manager.endpoint not in words


def test_two_names_of_one_process_share_a_connection(make, kit):
    prefill, decode = make("prefill"), make("decode")
    port = tcp_address(prefill.manager.endpoint)[1]
    running, sender = kit.claim(decode, prefill, 1, [9]), kit.offer(prefill, 1, [8], send=False)
    for number, host in enumerate(["127.0.0.1", "localhost", "127.0.0.1", "localhost"]):
        hand_over(prefill, decode, kit, f"{host}:{port}", room=10 + number)
    sender.send([8])
    assert running.wait(3) is KVPoll.Success
    assert len(prefill.manager.info()["peers"]) == len(decode.manager.info()["peers"]) == 1


def test_two_addresses_of_one_process_lead_to_it_from_then_on(make, kit):
    prefill = make("prefill", bind_host="0.0.0.0", advertise_host="127.0.0.1", insecure=True)
    decode = make("decode")
    port = tcp_address(prefill.manager.endpoint)[1]
    for number, host in enumerate(["127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.1"]):
        hand_over(prefill, decode, kit, f"{host}:{port}", room=10 + number)
    kit.until(lambda: len(prefill.manager.info()["peers"]) == len(decode.manager.info()["peers"]) == 1)


def test_out_of_sockets_fails_rooms_and_nothing_else(make, kit, monkeypatch):
    monkeypatch.setattr(links, "MAX_SOCKETS", 8)
    decode = make("decode")
    monkeypatch.undo()
    prefills = [make("prefill") for _ in range(6)]
    rooms = [kit.claim(decode, prefill, number, [number]) for number, prefill in enumerate(prefills)]
    for number, prefill in enumerate(prefills):
        kit.offer(prefill, number, [1])
    ends = [room.wait(5) for room in rooms]
    assert {*ends} == {KVPoll.Success, KVPoll.Failed}
    failed = [room.failure() for room in rooms if room.failure()]
    assert all("Too many open files" in str(error) for error in failed)
    for prefill in prefills:
        prefill.manager.shutdown()
    kit.until(lambda: not decode.manager.info()["peers"])
    late = make("prefill")
    hand_over(late, decode, kit, late.manager.endpoint, room=50)


def test_twenty_managers_at_once(make, kit):
    with ThreadPoolExecutor(20) as pool:
        sides = list(pool.map(make, ["prefill", "decode"] * 10))
    ports = [tcp_address(side.manager.endpoint)[1] for side in sides]
    assert len({*ports}) == 20
    pairs = list(zip(sides[::2], sides[1::2], strict=True))
    rooms = [kit.claim(decode, prefill, 5, [3, 4]) for prefill, decode in pairs]
    for prefill, _ in pairs:
        prefill.fill([1, 2], seed=prefill.manager.node.incarnation % 1000)
        kit.offer(prefill, 5, [1, 2])
    for room, (prefill, decode) in zip(rooms, pairs, strict=True):
        assert room.wait(10) is KVPoll.Success
        assert (decode.pages([3, 4]) == prefill.pages([1, 2])).all()
    assert len({PeerId(side.manager.node.incarnation) for side in sides}) == 20


def test_the_data_plane_may_have_addresses_of_its_own(make, kit):
    more = {"data_bind_host": "127.0.0.4", "data_advertise_host": "127.0.0.4", "engine_options": "mechanism=tcp"}
    prefill, decode = make("prefill", **more), make("decode", **more)
    assert decode.manager.endpoint.startswith("tcp://127.0.0.1:")
    assert b"127.0.0.4" in decode.engine.describe()
    rows = prefill.fill([1], seed=1)
    receiver = kit.claim(decode, prefill, 1, [2])
    kit.offer(prefill, 1, [1])
    assert receiver.wait(3) is KVPoll.Success
    assert (decode.pages([2]) == rows).all()


@pytest.mark.parametrize("setting", ["data_bind_host", "data_advertise_host"])
def test_a_wildcard_of_the_data_plane_is_refused_by_its_name(make, setting):
    with pytest.raises(ConfigError, match=f"{setting} '0.0.0.0' is"):
        make("decode", **{setting: "0.0.0.0"})
