"""The server on real loopback sockets."""

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.bootstrap import BootstrapClient, BootstrapServer, RankEntry, RefusedError, server
from kvferry.errors import AddressError, ConfigError
from kvferry.ids import Rank

ENTRY = RankEntry(Rank(), Rank(1, 1, 1, 1), "tcp://10.0.0.1:7000", "digest", 1, 0)


def bootstrap_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-bootstrap")]


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    yield
    assert bootstrap_threads() == []


def ask(port, request, host="127.0.0.1", limit_s=5.0):
    """Send raw bytes; return all that comes until the server closes."""
    with socket.create_connection((host, port), limit_s) as sock:
        sock.sendall(request)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
        return answer


def test_the_server_answers_as_soon_as_it_is_constructed():
    with BootstrapServer(port=0) as running:
        assert running.port > 0
        assert running.url == f"http://127.0.0.1:{running.port}"
        assert BootstrapClient(running.url).health().instance == running.instance


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_it_serves_over_ipv6(host):
    with BootstrapServer(host, port=0) as running:
        assert running.url == f"http://[::1]:{running.port}"
        client = BootstrapClient(running.url)
        client.register(ENTRY)
        assert client.topology().entries == (ENTRY,)


def test_a_name_is_resolved():
    with BootstrapServer("localhost", port=0) as running:
        assert BootstrapClient(f"localhost:{running.port}").health().status == "ok"


def test_a_port_in_use_is_an_error_of_the_constructor_that_names_it():
    with BootstrapServer(port=0) as running:
        with pytest.raises(AddressError, match=rf"127\.0\.0\.1:{running.port} .*port is in use") as caught:
            BootstrapServer(port=running.port)
        assert caught.value.hint
        assert len(bootstrap_threads()) == 1
        assert BootstrapClient(running.url).health().instance == running.instance


def test_a_port_that_is_bound_but_not_yet_listening_is_in_use_too():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        with BootstrapServer(port=other.getsockname()[1]), pytest.raises(OSError, match="in use"):
            other.listen()


def test_a_closed_servers_port_can_be_taken_at_once_and_shows_another_instance():
    with BootstrapServer(port=0) as first:
        BootstrapClient(first.url).register(ENTRY)
    with BootstrapServer(port=first.port) as second:
        topology = BootstrapClient(second.url).topology()
        assert topology.entries == ()
        assert topology.instance == second.instance != first.instance


def test_twenty_servers_at_once_get_twenty_ports():
    with ThreadPoolExecutor(20) as pool:
        servers = list(pool.map(lambda _: BootstrapServer(port=0), range(20)))
        try:
            assert len({running.port for running in servers}) == 20
            seen = list(pool.map(lambda running: BootstrapClient(running.url, timeout_s=10).health(), servers))
            assert [health.instance for health in seen] == [running.instance for running in servers]
        finally:
            list(pool.map(lambda running: running.close(), servers))


def test_of_many_that_want_one_port_at_once_one_gets_it():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    together = threading.Barrier(12)

    def start(_):
        together.wait(10)
        try:
            return BootstrapServer(port=port)
        except AddressError as error:
            return str(error)

    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(start, range(12)))
    (winner,) = [result for result in results if isinstance(result, BootstrapServer)]
    winner.close()
    assert all("port is in use" in text for text in results if text is not winner)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("", 0, "empty"),
        ("192.0.2.1", 0, "can't be bound"),
        ("no such host", 0, "can't be resolved"),
        ("x" * 70 + ".test", 0, "can't be resolved"),
        ("127.0.0.1", -1, "-1"),
        ("127.0.0.1", 65536, "65536"),
    ],
)
def test_an_address_that_cannot_be_bound_is_refused_by_name(host, port, words):
    with pytest.raises(AddressError, match=words):
        BootstrapServer(host, port, token="t")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_hosts_are_let_in_only_with_a_token_or_on_demand(host):
    with pytest.raises(ConfigError, match="without a token") as caught:
        BootstrapServer(host, port=0)
    assert "insecure" in caught.value.hint


@pytest.mark.parametrize("how", [{"token": "s3cret"}, {"insecure": True}])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_bind_is_reached_on_the_loopback(host, how):
    with BootstrapServer(host, port=0, **how) as running:
        assert running.url == f"http://{'[::1]' if host == '::' else '127.0.0.1'}:{running.port}"
        client = BootstrapClient(running.url, token=how.get("token"))
        assert client.register(ENTRY).instance == running.instance
        assert BootstrapClient(f"127.0.0.1:{running.port}").health().status == "ok"


def test_without_the_token_nothing_is_read_or_written():
    with BootstrapServer(port=0, token="s3cret") as running:
        for token in (None, "other"):
            stranger = BootstrapClient(running.url, token=token)
            for call in (lambda: stranger.register(ENTRY), stranger.topology, stranger.ready):  # noqa: B023  called here
                with pytest.raises(RefusedError, match="401") as caught:
                    call()
                assert caught.value.code == "unauthorised"
                assert "s3cret" not in str(caught.value)
            assert stranger.health().status == "ok"
        assert BootstrapClient(running.url, token="s3cret").topology().entries == ()


@pytest.mark.parametrize("options", [{"ttl_s": 0}, {"room_ttl_s": -1}, {"token": ""}])
def test_senseless_options_are_refused_before_anything_is_bound(options):
    with pytest.raises(ConfigError):
        BootstrapServer(port=0, **options)


def test_a_server_that_does_not_start_is_an_error_of_the_constructor_and_frees_the_port(monkeypatch):
    monkeypatch.setattr(server, "_START_LIMIT_S", 0.05)
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda *_: None)
    with pytest.raises(AddressError, match=r"did not start within 0\.05 s") as caught:
        BootstrapServer(port=0)
    port = int(str(caught.value).split("127.0.0.1:")[1].split()[0])
    socket.create_server(("127.0.0.1", port)).close()


def test_entries_expire_by_real_time():
    with BootstrapServer(port=0, ttl_s=0.2) as running:
        client = BootstrapClient(running.url)
        assert client.register(ENTRY).ttl_s == 0.2
        assert client.ready().ready
        deadline = time.monotonic() + 5
        while client.topology().entries and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not client.ready().ready
        assert client.topology().sizes is None


def test_what_is_not_http_ends_its_connection_and_nothing_else(monkeypatch):
    monkeypatch.setattr(server, "_MAX_CONNECTION_S", 0.2)
    post = b"POST /rooms HTTP/1.1\r\nHost: x\r\n"
    requests = [
        b"\x00\x01\x02\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET /health HTTP/1.1\r\nA: " + b"x" * 100_000 + b"\r\n\r\n",
        post + b"Content-Length: -5\r\n\r\n",
        post + b"Content-Length: 99999999999999999999999999\r\n\r\n{}",
        post + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ]
    with BootstrapServer(port=0) as running:
        for request in requests:
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                answer = ask(running.port, request)
            assert b" 500 " not in answer
            assert b"Traceback" not in answer
        assert BootstrapClient(running.url).health().status == "ok"


def test_a_body_over_the_limit_is_cut_off_with_413():
    with BootstrapServer(port=0) as running:
        head = b"POST /rooms HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1048577\r\n\r\n"
        assert ask(running.port, head + b" " * 1048577).startswith(b"HTTP/1.1 413")


STALLED = (b"", b"GET /hea", b"POST /rooms HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")


def test_peers_that_stall_do_not_delay_others_and_are_cut_off(monkeypatch):
    monkeypatch.setattr(server, "_MAX_CONNECTION_S", 0.2)
    with BootstrapServer(port=0) as running, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", running.port)
        stalled = [stack.enter_context(socket.create_connection(address, 5)) for _ in STALLED]
        for sock, opening in zip(stalled, STALLED, strict=True):
            sock.sendall(opening)
        assert BootstrapClient(running.url, timeout_s=1).health().status == "ok"
        for sock in stalled:
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(65536) == b""


@pytest.mark.parametrize("opening", STALLED, ids=["silent", "half a line", "half a body"])
def test_close_is_bounded_while_a_peer_stalls(opening):
    running = BootstrapServer(port=0)
    with socket.create_connection(("127.0.0.1", running.port), 5) as stalled:
        stalled.sendall(opening)
        BootstrapClient(running.url).health()
        begun = time.monotonic()
        running.close()
        running.close()
        assert time.monotonic() - begun < 4
        with contextlib.suppress(ConnectionResetError):
            assert stalled.recv(65536) == b""
        assert bootstrap_threads() == []


def test_it_is_quiet_and_leaves_other_uvicorns_alone(caplog):
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "uvicorn.access")]
    before = [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    with caplog.at_level(logging.DEBUG), BootstrapServer(port=0) as running:
        BootstrapClient(running.url).health()
        ask(running.port, b"GARBAGE\r\n\r\n")
        loggers[0].info("from another uvicorn")
    said = [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")]
    assert said == ["from another uvicorn"]
    assert [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers] == before


def test_a_program_that_forgets_to_close_ends_anyway():
    program = "from kvferry.bootstrap import BootstrapServer; print(BootstrapServer(port=0).port)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert int(ended.stdout) > 0


def test_many_clients_at_once_keep_one_holder_per_rank():
    sizes = Rank(1, 1, 1, 4)
    entries = [
        RankEntry(Rank(tp=tp), sizes, f"tcp://10.0.0.{who}:7000", "d", who, 0) for tp in range(4) for who in (1, 2, 3)
    ]
    with BootstrapServer(port=0) as running:
        client = BootstrapClient(running.url, timeout_s=20)

        def outcome(entry):
            try:
                return client.register(entry).outcome
            except RefusedError as refused:
                return refused.code

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(outcome, entries))
        assert sorted(outcomes) == ["added"] * 4 + ["conflict"] * 8
        topology = client.topology()
        assert topology.complete
        winners = {entry.rank: entry for entry, said in zip(entries, outcomes, strict=True) if said == "added"}
        assert {entry.rank: entry for entry in topology.entries} == winners
