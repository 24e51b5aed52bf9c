"""The routes, through an in-process client: every answer is JSON of the documented shape."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from kvferry.bootstrap.app import BootstrapApp
from kvferry.bootstrap.registry import Registry
from kvferry.errors import ConfigError

LIMIT_BYTES = 1 << 20
HOSTILE_JSON = ["-1", "2147483648", "9223372036854775808", "1" + "0" * 5000, "NaN", "Infinity", '"1"', "1.0",
                "1e3", "null", "true", "[]", "{}"]  # fmt: skip


class World:
    """A registry with a hand-made clock behind its routes."""

    def __init__(self, token=None, **registry):
        self.now = 0.0
        self.registry = Registry(instance="inst", **registry)
        self.app = BootstrapApp(self.registry, token=token, clock=lambda: self.now)
        self.http = TestClient(self.app.starlette())

    def call(self, method, path, body=None, status=200, **headers):
        content = body if isinstance(body, (bytes, str)) or body is None else json.dumps(body)
        answer = self.http.request(method, path, content=content, headers=headers)
        assert answer.status_code == status, answer.text
        said = answer.json()
        assert said["instance"] == "inst"
        if status >= 400 and path != "/ready":
            assert said["error"]
            assert said["code"]
            assert "Traceback" not in answer.text
        return said

    def metrics(self):
        lines = self.http.get("/metrics").text.splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


@pytest.fixture
def world():
    return World()


def body(tp=0, size=2, incarnation=1, **more):
    return {
        "rank": {"dp": 0, "pp": 0, "cp": 0, "tp": tp},
        "sizes": {"dp": 1, "pp": 1, "cp": 1, "tp": size},
        "endpoint": f"tcp://10.0.0.1:{7000 + tp}",
        "layout_digest": "d",
        "incarnation": incarnation,
        "epoch": 0,
        **more,
    }


def test_ranks_register_are_looked_up_and_leave(world):
    assert world.call("PUT", "/register", body(0))["outcome"] == "added"
    said = world.call("GET", "/ready", status=503)
    assert (said["ready"], said["registered"], said["expected"]) == (False, 1, 2)
    assert said["missing"] == [{"dp": 0, "pp": 0, "cp": 0, "tp": 1}]
    said = world.call("PUT", "/register", body(1, extra={"model": "m"}, load_balance="room"))
    assert (said["outcome"], said["ttl_s"], said["generation"]) == ("added", 6.0, 2)
    assert world.call("GET", "/ready")["ready"] is True
    topology = world.call("GET", "/topology")
    assert topology["sizes"] == {"dp": 1, "pp": 1, "cp": 1, "tp": 2}
    assert [found["endpoint"] for found in topology["entries"]] == [
        "tcp://10.0.0.1:7000",
        "tcp://10.0.0.1:7001",
    ]
    assert topology["entries"][1]["extra"] == {"model": "m"}
    assert world.call("GET", "/topology?dp=0")["missing"] == []
    holder = {"rank": body(1)["rank"], "incarnation": 1}
    assert world.call("DELETE", "/register", holder)["removed"] is True
    assert world.call("DELETE", "/register", holder)["removed"] is False
    assert len(world.call("GET", "/topology")["entries"]) == 1


def test_a_conflict_is_a_409_and_changes_nothing(world):
    world.call("PUT", "/register", body(incarnation=1))
    said = world.call("PUT", "/register", body(incarnation=2), status=409)
    assert said["code"] == "conflict"
    assert "expires in 6.0 s" in said["hint"]
    assert world.call("PUT", "/register", body(size=4), status=409)["code"] == "sizes_differ"
    assert [found["incarnation"] for found in world.call("GET", "/topology")["entries"]] == [1]


def test_entries_expire_by_the_servers_clock(world):
    world.call("PUT", "/register", body())
    world.now = 10.0
    assert world.call("GET", "/topology")["sizes"] is None
    assert world.call("GET", "/ready", status=503)["expected"] == 0
    assert world.metrics()["kvferry_bootstrap_expired_total"] == "1.0"


def test_rooms_are_put_and_queried_in_batches(world):
    assert world.call("POST", "/rooms", {"rooms": {"7": 0, "18446744073709551615": 3}})["stored"] == 2
    asked = [7, 8, 2**64 - 1, 7]
    assert world.call("POST", "/rooms/query", {"rooms": asked})["rooms"] == {
        "7": 0,
        "18446744073709551615": 3,
    }
    assert world.call("POST", "/rooms", {"rooms": {}})["stored"] == 0


def test_a_full_room_table_says_so():
    world = World(max_rooms=1)
    world.call("POST", "/rooms", {"rooms": {"1": 0}})
    assert world.call("POST", "/rooms", {"rooms": {"2": 0}}, status=507)["code"] == "rooms_full"


def test_metrics_count_what_happened(world):
    world.call("PUT", "/register", body())
    world.call("PUT", "/register", body())
    world.call("PUT", "/register", body(incarnation=2), status=409)
    world.call("PUT", "/register", "{", status=400)
    world.call("GET", "/topology")
    world.call("POST", "/rooms", {"rooms": {"1": 0}})
    world.call("POST", "/rooms/query", {"rooms": [1, 2, 3]})
    said = world.metrics()
    name = "kvferry_bootstrap_"
    assert said[f"{name}ranks"] == "1.0"
    assert said[f"{name}ranks_expected"] == "2.0"
    for outcome in ("added", "renewed", "conflict", "bad_request"):
        assert said[f'{name}registrations_total{{outcome="{outcome}"}}'] == "1.0"
    assert said[f"{name}lookups_total"] == "1.0"
    assert said[f'{name}room_queries_total{{result="found"}}'] == "1.0"
    assert said[f'{name}room_queries_total{{result="unknown"}}'] == "2.0"
    assert said[f'{name}info{{instance="inst"}}'] == "1.0"


def test_two_servers_in_one_process_count_apart():
    one, other = World(), World()
    one.call("PUT", "/register", body())
    assert other.metrics()["kvferry_bootstrap_ranks"] == "0.0"


@pytest.mark.parametrize("field", ["rank", "sizes", "endpoint", "layout_digest", "incarnation", "epoch"])
def test_a_missing_field_is_refused_by_name(world, field):
    sent = body()
    del sent[field]
    assert field in world.call("PUT", "/register", sent, status=400)["error"]


@pytest.mark.parametrize("axis", ["dp", "pp", "cp", "tp"])
@pytest.mark.parametrize("where", ["rank", "sizes"])
def test_a_missing_axis_is_refused_and_does_not_mean_zero(world, where, axis):
    sent = body()
    del sent[where][axis]
    assert axis in world.call("PUT", "/register", sent, status=400)["error"]
    if where == "rank":
        holder = {"rank": sent["rank"], "incarnation": 1}
        assert axis in world.call("DELETE", "/register", holder, status=400)["error"]
    assert world.registry.counts(0.0) == (0, 0)


def test_unknown_fields_are_tolerated(world):
    world.call("PUT", "/register", body(from_a_newer_version={"a": [1]}))


@pytest.mark.parametrize("axis", ["dp", "pp", "cp", "tp"])
@pytest.mark.parametrize("where", ["rank", "sizes"])
def test_a_hostile_number_in_a_grid_is_a_400(world, where, axis):
    sent = body()
    sent[where][axis] = "@"
    for value in HOSTILE_JSON:
        world.call("PUT", "/register", json.dumps(sent).replace('"@"', value), status=400)
    assert world.registry.counts(0.0) == (0, 0)


@pytest.mark.parametrize("value", ["-1", "18446744073709551616", *HOSTILE_JSON[3:]])
@pytest.mark.parametrize("field", ["incarnation", "epoch"])
def test_a_hostile_identity_is_a_400(world, field, value):
    world.call("PUT", "/register", json.dumps(body(**{field: "@"})).replace('"@"', value), status=400)
    assert world.registry.counts(0.0) == (0, 0)


@pytest.mark.parametrize("value", HOSTILE_JSON)
def test_hostile_rooms_and_dp_ranks_are_a_400(world, value):
    world.call("POST", "/rooms", f'{{"rooms": {{"1": {value}}}}}', status=400)
    if value != "[]":  # no rooms, no error
        world.call("POST", "/rooms/query", f'{{"rooms": {value}}}', status=400)
    if value not in ("2147483648", "9223372036854775808"):  # these are room numbers like others
        world.call("POST", "/rooms/query", f'{{"rooms": [{value}]}}', status=400)
    assert world.call("POST", "/rooms/query", {"rooms": [1]})["rooms"] == {}


@pytest.mark.parametrize("room", ["-1", "x", "", "1.5", "18446744073709551616", "1" + "0" * 5000, "NaN"])
def test_a_hostile_room_number_is_a_400(world, room):
    world.call("POST", "/rooms", {"rooms": {room: 0}}, status=400)


@pytest.mark.parametrize("dp", ["", "-1", "1.5", "abc", "NaN", "1", "2147483648", "9" * 5000, "%D9%A1", "0x0", "+0"])
def test_a_hostile_dp_in_a_query_is_a_400(world, dp):
    world.call("PUT", "/register", body())
    world.call("GET", f"/topology?dp={dp}", status=400)


@pytest.mark.parametrize(
    "sent",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"\x00", b'{"rank":' + b"[" * 200000, b"[" * 500000,
     b'{"endpoint": "\xff"}', b'{"a":' * 100000],
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/register"), ("DELETE", "/register"), ("POST", "/rooms"), ("POST", "/rooms/query")],
)
def test_a_body_that_is_not_the_expected_json_is_a_400(world, method, path, sent):
    said = world.call(method, path, sent, status=400)
    assert said["code"] == "bad_request"
    assert len(said["error"]) < 400


def test_text_that_is_not_utf8_is_a_400(world):
    sent = json.dumps(body(layout_digest="@")).encode().replace(b'"@"', b'"\xff\xfe"')
    world.call("PUT", "/register", sent, status=400)


def test_an_oversize_body_is_a_413(world):
    assert world.call("POST", "/rooms", b" " * (LIMIT_BYTES + 1), status=413)["code"] == "too_large"
    world.call("POST", "/rooms", b'{"rooms":{}}' + b" " * (LIMIT_BYTES - 12))


def exchange(app, receive):
    """Run one PUT /register by hand; return the status and the answer."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "PUT", "path": "/register", "query_string": b"", "headers": []}
    asyncio.run(app.starlette()(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_body_that_does_not_arrive_is_a_408():
    async def receive():
        await asyncio.sleep(60)

    app = BootstrapApp(Registry(), body_timeout_s=0.05)
    status, said = exchange(app, receive)
    assert (status, said["code"]) == (408, "slow")


def test_a_client_that_leaves_in_mid_body_is_no_exception():
    async def receive():
        return {"type": "http.disconnect"}

    status, said = exchange(BootstrapApp(Registry()), receive)
    assert (status, said["code"]) == (400, "bad_request")


def test_other_paths_and_methods_get_json_too(world):
    for path in ("/route", "/topology/"):
        assert world.call("GET", path, status=404)["code"] == "not_found"
    assert world.call("POST", "/register", "{}", status=405)["code"] == "bad_method"
    assert world.call("GET", "/" + "x" * 2000, status=404)["code"] == "not_found"


def test_with_a_token_every_route_but_health_wants_it():
    world = World(token="s3cret")
    routes = [("PUT", "/register"), ("DELETE", "/register"), ("GET", "/topology"), ("POST", "/rooms"),
              ("POST", "/rooms/query"), ("GET", "/ready"), ("GET", "/metrics")]  # fmt: skip
    for method, path in routes:
        for given_header in ({}, {"authorization": "Bearer other"}, {"authorization": "s3cret"}):
            answer = world.http.request(method, path, content=json.dumps(body()), headers=given_header)
            assert answer.status_code == 401, path
            assert answer.json()["code"] == "unauthorised"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "s3cret" not in answer.text
    assert world.registry.counts(0.0) == (0, 0)
    assert world.call("GET", "/health")["status"] == "ok"
    world.call("PUT", "/register", body(), authorization="Bearer s3cret")
    assert len(world.call("GET", "/topology", authorization="Bearer s3cret")["entries"]) == 1


def test_an_empty_token_is_refused_rather_than_taken_for_none():
    with pytest.raises(ConfigError, match="token"):
        World(token="")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
fuzzed = World()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(body())), json_values)
def test_any_json_in_any_field_is_answered_and_never_a_500(field, value):
    answer = fuzzed.http.put("/register", content=json.dumps({**body(), field: value}))
    assert answer.status_code in (200, 400, 409)
    assert answer.json()["instance"] == "inst"


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["/rooms", "/rooms/query"]), json_values | st.builds(lambda v: {"rooms": v}, json_values))
def test_any_json_about_rooms_is_answered_and_never_a_500(path, value):
    assert fuzzed.http.post(path, content=json.dumps(value)).status_code in (200, 400)
