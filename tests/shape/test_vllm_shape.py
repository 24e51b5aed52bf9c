"""The connector interface, driven by a scheduler half and a worker half in two processes, in vLLM's order of calls."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pools import Request, make_pool, make_request
from ranks import SETTINGS
from vllm_scheduler import Engine, Params, Running

from kvferry import KVManager, KVReceiver, KVSender, ReceiveFacts, SendFacts
from kvferry.errors import InputError

PREFILL: Params = {"do_remote_decode": True}


class Pair:
    """A prefill and a decode engine, and the proxy between them."""

    def __init__(self) -> None:
        self.prefill, self.decode = Engine("prefill"), Engine("decode")

    def until(self, condition: Callable[[], Any], *engines: Engine, limit_s: float = 10.0) -> None:
        """Step the engines (both by default) until the condition holds."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, [engine.requests for engine in (self.prefill, self.decode)]
            for engine in engines or (self.prefill, self.decode):
                engine.step()
            time.sleep(0.005)

    def prefill_first(self, req_id: str, request: Request) -> Params:
        """Prefill, and take the parameters for decode out of the JSON of its answer."""
        running = self.prefill.add(req_id, request, PREFILL)
        self.until(lambda: running.result, self.prefill)
        return through_proxy(running)

    def check_once(self, sent: list[str], received: list[str]) -> None:
        """Everything is reported once, however often the engines step; no block is kept, none was overwritten."""
        self.until(lambda: self.prefill.reported["sent"].keys() >= set(sent))
        for running in list(self.decode.requests.values()):
            if running.status in {"loaded", "recomputed"}:
                self.decode.finish(running.req_id)
        self.until(lambda: self.decode.reported["received"].keys() >= set(received))
        for _ in range(3):
            self.prefill.step()
            self.decode.step()
        assert self.prefill.reported == {"sent": dict.fromkeys(sent, 1), "received": {}}
        assert self.decode.reported == {"sent": {}, "received": dict.fromkeys(received, 1)}
        for engine in (self.prefill, self.decode):
            assert {running.status for running in engine.requests.values()} == {"freed"}
            assert engine.call("stray_bytes", [0, *engine.free, -1]) == 0

    def forget(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.requests.clear()
            engine.reasons.clear()
            for counter in engine.reported.values():
                counter.clear()


def through_proxy(running: Running) -> Params:
    assert running.result is not None
    params: Params = json.loads(json.dumps(running.result))
    return params


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.prefill.close()
    pair.decode.close()


@pytest.fixture
def pair(engines: Pair) -> Pair:
    engines.forget()
    return engines


def load(pair: Pair, req_id: str, request: Request, params: Params, *, is_expected_to_load: bool = True) -> None:
    """Decode a request up to the point where its prompt's KV is there, loaded or recomputed, and look at it."""
    running = pair.decode.add(req_id, request, params)
    pair.until(lambda: running.status in {"loaded", "recomputed"}, pair.decode)
    assert running.status == ("loaded" if is_expected_to_load else "recomputed")
    assert pair.decode.holds(req_id)


def test_a_request_travels_while_the_producer_does_not_even_step(pair: Pair) -> None:
    request = make_request(0, 90)
    load(pair, "a", request, pair.prefill_first("a", request))
    assert not pair.prefill.reported["sent"]
    pair.check_once(["a"], ["a"])


def test_many_requests_of_many_lengths_are_each_reported_once(pair: Pair) -> None:
    requests = {f"r{i}": make_request(i, length) for i, length in enumerate([1, 16, 17, 39, 41, 64, 100])}
    for req_id, request in requests.items():
        pair.prefill.add(req_id, request, PREFILL)
    pair.until(lambda: all(running.result for running in pair.prefill.requests.values()), pair.prefill)
    for req_id, request in requests.items():
        pair.decode.add(req_id, request, through_proxy(pair.prefill.requests[req_id]))
    pair.until(lambda: all(running.status == "loaded" for running in pair.decode.requests.values()))
    assert all(pair.decode.holds(req_id) for req_id in requests)
    pair.check_once(list(requests), list(requests))


@pytest.mark.parametrize("prefix", [16, 64])
def test_blocks_of_the_decode_side_prefix_are_not_loaded(pair: Pair, prefix: int) -> None:
    request = dataclasses.replace(make_request(1, 90), decode_prefix=prefix)
    load(pair, "p", request, pair.prefill_first("p", request))
    pair.check_once(["p"], ["p"])


def test_a_claim_may_come_two_seconds_after_the_prefill_finished(pair: Pair) -> None:
    request = make_request(2, 60)
    params = pair.prefill_first("late", request)
    time.sleep(2.0)
    load(pair, "late", request, params)
    pair.check_once(["late"], ["late"])


def test_a_request_whose_lease_ended_is_recomputed(pair: Pair) -> None:
    request = make_request(3, 60)
    params = pair.prefill_first("lease", request)
    pair.until(lambda: pair.prefill.reported["sent"], pair.prefill)
    assert "no_claim" in pair.prefill.reasons["lease"]
    load(pair, "lease", request, params, is_expected_to_load=False)
    assert "no_claim" in pair.decode.reasons["lease"]
    assert "noticed by prefill" in pair.decode.reasons["lease"]
    pair.check_once(["lease"], ["lease"])


def test_a_request_that_the_producer_aborted_is_recomputed(pair: Pair) -> None:
    request = make_request(4, 60)
    params = pair.prefill_first("gone", request)
    pair.prefill.abort("gone")
    pair.until(lambda: pair.prefill.reported["sent"], pair.prefill)
    load(pair, "gone", request, params, is_expected_to_load=False)
    assert "aborted: request gone was aborted; noticed by prefill" in pair.decode.reasons["gone"]
    pair.check_once(["gone"], ["gone"])


def both_at_once(pair: Pair, req_id: str, request: Request, room: int) -> tuple[Running, Running]:
    """A proxy that sends a request to both engines at the same time; the first chunk has landed, others have not."""
    producer = pair.prefill.add(req_id, request, {**PREFILL, "room": room})
    pair.prefill.step()
    params = {"do_remote_prefill": True, "room": room, "endpoint": pair.prefill.connector.endpoint}
    consumer = pair.decode.add(req_id, request, params)
    pair.decode.step()
    pair.until(lambda: pair.decode.call("bytes_landed", req_id), pair.decode)
    return producer, consumer


def test_a_consumer_that_aborts_while_it_loads_gets_its_blocks_back_once(pair: Pair) -> None:
    _, consumer = both_at_once(pair, "c", make_request(5, 100), 50)
    pair.decode.abort("c")
    pair.until(lambda: consumer.status == "freed")
    pair.check_once(["c"], ["c"])
    assert "request c was aborted; noticed by decode" in pair.prefill.reasons["c"]


def test_blocks_of_a_preempted_request_are_reused_at_once_and_its_next_attempt_is_right(pair: Pair) -> None:
    request, other = make_request(6, 100), make_request(7, 100)
    pair.prefill.add("pre", request, PREFILL)
    pair.prefill.step()
    taken = set(pair.prefill.requests["pre"].groups["kv"])
    pair.prefill.preempt("pre")
    victim = pair.prefill.requests.pop("pre")
    pair.prefill.add("other", other, PREFILL)
    pair.prefill.requests["pre"] = victim
    pair.prefill.step()
    assert taken <= {b for blocks in pair.prefill.requests["other"].groups.values() for b in blocks}
    pair.until(lambda: all(running.result for running in pair.prefill.requests.values()), pair.prefill)
    for req_id, each in (("pre", request), ("other", other)):
        load(pair, req_id, each, through_proxy(pair.prefill.requests[req_id]))
    pair.check_once(["pre", "other"], ["pre", "other"])


def test_a_claim_of_a_preempted_request_fails_and_is_recomputed(pair: Pair) -> None:
    producer, consumer = both_at_once(pair, "pc", make_request(8, 100), 80)
    pair.prefill.preempt("pc")
    pair.until(lambda: consumer.status == "recomputed" and producer.result)
    assert pair.decode.holds("pc")
    assert "request pc was preempted; noticed by prefill" in pair.decode.reasons["pc"]
    pair.prefill.abort("pc")
    pair.check_once(["pc"], ["pc"])


def test_send_facts_that_cannot_be_carried_out_leave_no_room_behind(nothing_left_behind: None) -> None:
    with KVManager(make_pool("page_major", 0, 1).args(), "prefill", environ={}, **SETTINGS) as manager:
        with pytest.raises(InputError, match="tokens 0 to 100 need 7 pages of 16 tokens, 2 were given"):
            KVSender.from_facts(manager, SendFacts(1, 2, num_tokens=100))
        KVSender(manager, None, 1).clear()


def test_receive_facts_that_cannot_be_carried_out_leave_no_room_behind(nothing_left_behind: None) -> None:
    with KVManager(make_pool("page_major", 0, 1).args(), "decode", environ={}, **SETTINGS) as manager:
        with pytest.raises(InputError, match="page 9999 is outside of the pool's 48 pages"):
            KVReceiver.from_facts(manager, ReceiveFacts(1, [9999], peers=("127.0.0.1:1",)))
        KVReceiver(manager, None, 1, peers=["127.0.0.1:1"]).clear()
