"""The client, mostly against servers that misbehave."""

import contextlib
import json
import socket
import threading
import time

import pytest

from kvferry.bootstrap import (
    DEFAULT_PORT,
    BootstrapClient,
    BootstrapServer,
    ConflictError,
    RankEntry,
    RefusedError,
    parse_address,
)
from kvferry.errors import AddressError, BootstrapError, ConfigError
from kvferry.ids import Rank

ENTRY = RankEntry(Rank(), Rank(1, 1, 1, 2), "tcp://10.0.0.1:7000", "digest", 1, 0, "room", {"model": "m"})
TOPOLOGY = {"sizes": None, "entries": [], "missing": [], "generation": 3, "instance": "i"}


@contextlib.contextmanager
def raw_server(behave):
    """A socket on which `behave(connection, stop)` answers each connection in turn."""
    stop = threading.Event()

    def serve():
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                if stop.is_set():
                    return
                behave(connection, stop)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join(10)
            assert not thread.is_alive()


def read_request(connection):
    request = b""
    while b"\r\n\r\n" not in request:
        piece = connection.recv(65536)
        if not piece:
            break
        request += piece
    return request


def http(status, body, length=None):
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body


def answering(raw):
    def behave(connection, _stop):
        read_request(connection)
        connection.sendall(raw)

    return behave


def fails_with(address, *words, timeout_s=2.0):
    client = BootstrapClient(address, timeout_s=timeout_s)
    begun = time.monotonic()
    with pytest.raises(BootstrapError) as caught:
        client.topology(1)
    took_s = time.monotonic() - begun
    for part in (address, "GET /topology?dp=1", *words):
        assert part in str(caught.value)
    assert caught.value.hint
    assert took_s < timeout_s + 1
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:8000", ("10.0.0.1", 8000)),
        ("http://node-1.example:8000", ("node-1.example", 8000)),
        ("http://node_1:8000/", ("node_1", 8000)),
        ("node", ("node", DEFAULT_PORT)),
        ("[::1]:8000", ("::1", 8000)),
        ("http://[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("[::1]", ("::1", DEFAULT_PORT)),
        ("::1", ("::1", DEFAULT_PORT)),
        ("http://2001:db8::7", ("2001:db8::7", DEFAULT_PORT)),
        (" localhost:65535 ", ("localhost", 65535)),
    ],
)
def test_every_usual_form_of_an_address_is_taken(text, expected):
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ":", ":80", "http://", "https://h:1", "tcp://h:1", "h:", "h:0", "h:65536", "h:-1", "h:1.0", "h:x",
     "h:\u0661", "h:1/path", "u@h:1", "h h:1", "[::1]x", "[::1]:", "[::1]:0", "[h]:1", "[]:1", "1:2:3", "::g",
     "h:1\r\nX: y", "http://http://h:1", "h:8998?x"],
)  # fmt: skip
def test_any_other_address_is_refused_by_name(text):
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "options", [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"token": "a\r\nX: y"}, {"token": ""}]
)
def test_senseless_options_are_refused(options):
    with pytest.raises(ConfigError):
        BootstrapClient("h:1", **options)


def test_every_call_works_against_a_real_server():
    with BootstrapServer(port=0, token="s3cret") as server:
        client = BootstrapClient(server.url, token="s3cret")
        assert client.health().status == "ok"
        assert client.topology().sizes is None
        said = client.register(ENTRY)
        assert (said.outcome, said.ttl_s, said.instance) == ("added", 6.0, server.instance)
        assert client.register(ENTRY).outcome == "renewed"
        topology = client.topology()
        assert topology.entries == (ENTRY,)
        assert topology.missing == (Rank(tp=1),)
        assert client.topology(0) == topology
        assert topology.generation == said.generation
        readiness = client.ready()
        assert (readiness.ready, readiness.registered, readiness.expected) == (False, 1, 2)
        assert readiness.missing == (Rank(tp=1),)
        assert client.put_rooms({2**64 - 1: 0, 5: 0}).stored == 2
        assert client.query_rooms([5, 6, 2**64 - 1]) == {5: 0, 2**64 - 1: 0}
        assert client.unregister(Rank(), 2).removed is False
        assert client.unregister(Rank(), 1).removed is True


def test_every_form_of_an_address_reaches_the_server():
    with BootstrapServer("::", port=0, insecure=True) as server:
        for form in ("127.0.0.1:{}", "http://127.0.0.1:{}/", "localhost:{}", "[::1]:{}", "http://[::1]:{}"):
            assert BootstrapClient(form.format(server.port)).health().instance == server.instance


def test_what_the_server_refuses_is_told_apart():
    with BootstrapServer(port=0) as server:
        client = BootstrapClient(server.url)
        client.register(ENTRY)
        rival = RankEntry(ENTRY.rank, ENTRY.sizes, "tcp://10.0.0.2:7000", "digest", 2, 0)
        with pytest.raises(
            ConflictError, match=r"PUT /register answered 409 .*10\.0\.0\.2:7000.*10\.0\.0\.1:7000"
        ) as caught:
            client.register(rival)
        assert server.url in str(caught.value)
        assert "expires in" in caught.value.hint
        with pytest.raises(RefusedError, match="answered 400") as caught:
            client.topology(1)
        assert caught.value.code == "outside_grid"
        with pytest.raises(RefusedError, match="incarnation"):
            client.register(RankEntry(ENTRY.rank, ENTRY.sizes, ENTRY.endpoint, "digest", 2**70, 0))


def test_a_closed_port_is_connection_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    begun = time.monotonic()
    fails_with(address, "connection refused")
    assert time.monotonic() - begun < 1


def test_a_host_that_does_not_resolve_is_an_error_of_the_call():
    client = BootstrapClient("x" * 70 + ".test:1")
    with pytest.raises(BootstrapError, match="GET /health failed"):
        client.health()


@pytest.mark.parametrize("status", [500, 404, 502, 301, 204])
@pytest.mark.parametrize("body", [b"", b"<html>Bad Gateway</html>", b"{}", b'{"error": "x"}', b"\xff" * 500])
def test_a_foreign_status_is_named_with_what_it_says(status, body):
    body = b"" if status == 204 else body
    with raw_server(answering(http(status, body))) as address:
        error = fails_with(address, f"answered {status}", "body")
        assert not isinstance(error, RefusedError)
        assert len(str(error)) < 900


@pytest.mark.parametrize(
    "body",
    [b"", b"OK", b"<html>", b"null", b"[]", b"{", b"\xff\xfe", b"[" * 200000,
     json.dumps({**TOPOLOGY, "generation": "3"}).encode(),
     json.dumps({**TOPOLOGY, "entries": [{}]}).encode()],
)  # fmt: skip
def test_an_answer_that_is_not_the_expected_json_is_an_error(body):
    with raw_server(answering(http(200, body))) as address:
        fails_with(address, "answered 200, but not as expected")


@pytest.mark.parametrize("field", sorted(TOPOLOGY))
def test_a_missing_field_of_an_answer_is_refused_by_name(field):
    body = json.dumps({name: value for name, value in TOPOLOGY.items() if name != field}).encode()
    with raw_server(answering(http(200, body))) as address:
        fails_with(address, field)


def test_unknown_fields_of_an_answer_are_tolerated():
    body = json.dumps({**TOPOLOGY, "from_a_newer_version": [1, {}]}).encode()
    with raw_server(answering(http(200, body))) as address:
        assert BootstrapClient(address).topology().generation == 3


def test_an_error_of_a_newer_server_keeps_its_code():
    body = json.dumps({"error": "no", "code": "brand_new", "instance": "i", "more": 1}).encode()
    with raw_server(answering(http(418, body))) as address:
        error = fails_with_refusal(address)
        assert error.code == "brand_new"
        assert "418" in str(error)


def fails_with_refusal(address):
    with pytest.raises(RefusedError) as caught:
        BootstrapClient(address).topology()
    return caught.value


@pytest.mark.parametrize(
    "raw", [b"", b"H", b"HTTP/1.1 200 OK\r\nContent-Le", b"\x00" * 50,
            b"220 smtp ready\r\n", b"HTTP/1.1 abc\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"HTTP/1.1 200 " + b"x" * 100_000,
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", http(200, b'{"si', length=500),
        http(200, json.dumps(TOPOLOGY).encode(), length=500)]
)  # fmt: skip
def test_a_broken_or_closed_answer_is_an_error_at_once(raw):
    with raw_server(answering(raw)) as address:
        fails_with(address)


def test_a_close_before_the_request_is_read_is_an_error_at_once():
    with raw_server(lambda _connection, _stop: None) as address:
        fails_with(address)


def stall(_connection, stop):
    stop.wait(10)


def stall_in_the_body(connection, stop):
    read_request(connection)
    connection.sendall(http(200, b"{", length=100))
    stop.wait(10)


def drip(raw):
    def behave(connection, stop):
        read_request(connection)
        for byte in raw + b" " * 100:
            connection.sendall(bytes([byte]))
            if stop.wait(0.05):
                return

    return behave


def endless_headers(connection, stop):
    while not stop.is_set():
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize(
    "behave",
    [
        stall,
        stall_in_the_body,
        drip(b"HTTP/1.1 200 OK\r\nA: "),
        drip(http(200, b"{", 10**6)),
        endless_headers,
    ],
)
def test_a_server_that_stalls_or_drips_ends_with_the_time_out(behave):
    with raw_server(behave) as address:
        fails_with(address, "within 0.4 s", timeout_s=0.4)


def test_a_listener_that_never_accepts_ends_with_the_time_out():
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # fill the queue: further connects get no answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        fails_with(f"127.0.0.1:{listener.getsockname()[1]}", "within 0.4 s", timeout_s=0.4)


def test_each_call_reaches_the_server_that_is_there_now():
    with BootstrapServer(port=0) as first:
        client = BootstrapClient(first.url)
        assert client.health().instance == first.instance
    with BootstrapServer(port=first.port) as second:
        assert client.health().instance == second.instance


def test_a_client_may_be_shared_by_threads():
    with BootstrapServer(port=0) as server:
        client = BootstrapClient(server.url, timeout_s=20)
        seen = []
        threads = [threading.Thread(target=lambda: seen.append(client.health().instance)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [server.instance] * 8
