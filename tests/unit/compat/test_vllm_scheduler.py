"""The scheduler half by itself: requests in, orders out. Nothing of vLLM is imported."""

import json
from types import SimpleNamespace

import pytest

from kvferry.compat.vllm import params as proxy_params
from kvferry.compat.vllm.layouts import CacheGroup
from kvferry.compat.vllm.orders import Orders
from kvferry.compat.vllm.scheduler import SchedulerHalf
from kvferry.errors import InputError

BLOCK = 4
PEERS = ("tcp://127.0.0.1:5000", "tcp://127.0.0.1:5001")
FULL, WINDOW = CacheGroup(BLOCK), CacheGroup(BLOCK, 6)


def half(role, groups=(FULL,)):
    made = SchedulerHalf(groups, lambda block_ids: block_ids, engine_id="e", role=role)
    made.endpoints = PEERS
    return made


def request(length, params, status="FINISHED_LENGTH_CAPPED", name="r"):
    tokens = list(range(length))
    return SimpleNamespace(
        request_id=name, kv_transfer_params=params, prompt_token_ids=tokens, _all_token_ids=list(tokens),
        num_prompt_tokens=length, max_tokens=8, status=SimpleNamespace(name=status),
    )  # fmt: skip


def prefilled(length, blocks, groups=(FULL,)):
    """(send order, parameters after a proxy's JSON)."""
    producer, asked = half("kv_producer", groups), request(length, {"do_remote_decode": True})
    producer.on_new_request(asked)
    stays, answer = producer.finished(asked, blocks)
    assert stays
    return producer.take_orders().sends["r"], json.loads(json.dumps(answer))


def test_a_finished_prefill_is_sent_and_its_parameters_lead_to_it():
    send, params = prefilled(10, [[7, 8, 9]])
    assert (send.kv_indices, send.state_indices) == ([7, 8, 9], {})
    assert (send.facts.num_kv_indices, send.facts.num_tokens) == (3, 10)
    assert (params["remote_host"], params["remote_port"], params["tp_size"]) == ("127.0.0.1", 5000, 2)
    consumer, asked = half("kv_consumer"), request(10, params)
    assert consumer.num_matched(asked, 0) == (10, True)
    consumer.allocated(asked, [[3, 1, 2]], 10)
    facts = consumer.take_orders().receives["r"].facts
    assert (facts.room, facts.tag, facts.peers) == (send.facts.room, send.facts.tag, PEERS)
    assert (facts.kv_indices, facts.decode_prefix_len, facts.num_tokens) == ([3, 1, 2], 0, 10)
    assert consumer.take_orders() == Orders()


def test_only_the_blocks_after_the_prefix_are_loaded():
    _, params = prefilled(10, [[7, 8, 9]])
    consumer, asked = half("kv_both"), request(10, params)
    assert consumer.num_matched(asked, 8) == (2, True)
    consumer.allocated(asked, [[3, 1, 2]], 2)
    receive = consumer.take_orders().receives["r"]
    assert (receive.facts.kv_indices, receive.facts.decode_prefix_len, receive.blocks) == ([2], 8, [2])


@pytest.mark.parametrize(("prefix", "full", "window"), [(0, [1, 2, 3, 4], [18, 19]), (12, [4], [19])])
def test_a_window_group_names_the_last_blocks_and_leaves_the_last_token_to_decode(prefix, full, window):
    groups = (FULL, WINDOW)
    send, params = prefilled(14, [[5, 6, 7, 8], [0, 0, 28, 29]], groups)
    assert (send.facts.num_tokens, send.kv_indices, send.state_indices) == (13, [5, 6, 7, 8], {"kv1": [28, 29]})
    consumer, asked = half("kv_consumer", groups), request(14, params)
    assert consumer.num_matched(asked, prefix) == (13 - prefix, True)
    consumer.allocated(asked, [[1, 2, 3, 4], [0, 0, 18, 19]], 13 - prefix)
    receive = consumer.take_orders().receives["r"]
    assert (receive.facts.kv_indices, receive.facts.state_indices) == (full, {"kv1": window})
    assert sorted(receive.blocks) == sorted(full + window)


def test_a_prompt_is_shortened_once_and_not_below_one_token():
    producer = half("kv_producer", (FULL, WINDOW))
    asked = request(14, {"do_remote_decode": True})
    producer.on_new_request(asked)
    producer.on_new_request(asked)  # preempted and scheduled again
    assert (asked.num_prompt_tokens, len(asked.prompt_token_ids), len(asked._all_token_ids)) == (13, 13, 13)
    short = request(1, {"do_remote_decode": True})
    producer.on_new_request(short)
    assert short.num_prompt_tokens == 1


def test_one_attempt_is_made():
    _, params = prefilled(10, [[7, 8, 9]])
    consumer, asked = half("kv_consumer"), request(10, params)
    consumer.allocated(asked, [[3, 1, 2]], 10)
    assert consumer.num_matched(asked, 0) == (0, False)


@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_room_that_nothing_is_wanted_of_is_released(has_blocks):
    groups = (FULL, WINDOW)
    send, params = prefilled(14, [[5, 6, 7, 8], [0, 0, 28, 29]], groups)
    consumer, asked = half("kv_consumer", groups), request(14, params, "FINISHED_ABORTED")
    if has_blocks:  # prompt_logprobs: vLLM reads no cache
        consumer.allocated(asked, [[1, 2, 3, 4], [0, 0, 18, 19]], 0)
    consumer.finished(asked, [[], []])
    orders = consumer.take_orders()
    (facts,) = orders.releases
    assert (facts.room, facts.kv_indices, facts.state_indices) == (send.facts.room, [], {"kv1": []})
    assert (facts.decode_prefix_len, facts.num_tokens) == (13, 13)
    assert orders == Orders(releases=[facts])


def test_a_load_whose_request_ends_is_aborted_and_one_that_is_reported_is_not():
    _, params = prefilled(10, [[7, 8, 9]])
    consumer, asked = half("kv_consumer"), request(10, params, "FINISHED_ABORTED")
    consumer.allocated(asked, [[3, 1, 2]], 10)
    assert consumer.finished(asked, [[3, 1, 2]]) == (False, None)
    assert consumer.take_orders().aborts == ["r"]
    consumer.loaded(["r"])
    consumer.finished(asked, [[3, 1, 2]])
    assert consumer.take_orders() == Orders()


@pytest.mark.parametrize(
    ("role", "params", "status"),
    [
        ("kv_producer", None, "FINISHED_STOPPED"),
        ("kv_producer", {"do_remote_decode": False}, "FINISHED_STOPPED"),
        ("kv_producer", {"do_remote_decode": True}, "FINISHED_ABORTED"),
        ("kv_producer", {"do_remote_decode": True}, "FINISHED_ERROR"),
        ("kv_consumer", {"do_remote_decode": True}, "FINISHED_STOPPED"),
    ],
)
def test_what_is_not_to_be_sent_is_freed_at_once(role, params, status):
    made = half(role)
    assert made.finished(request(10, params, status), [[7, 8, 9]]) == (False, None)
    assert made.take_orders() == Orders()


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_a_request_that_asks_for_nothing_loads_nothing(params):
    consumer, asked = half("kv_consumer"), request(10, params)
    assert consumer.num_matched(asked, 0) == (0, False)
    consumer.allocated(asked, [[3, 1, 2]], 0)
    assert consumer.take_orders() == Orders()


def test_a_producer_loads_nothing(caplog):
    assert half("kv_producer").num_matched(request(10, {"do_remote_prefill": True}), 0) == (0, False)
    assert "remote prefill of a kv_producer" in caplog.text


def test_a_room_survives_a_proxy_that_reads_numbers_as_floating_point():
    room = (1 << 63) - 1
    params = json.loads(json.dumps(proxy_params.answer(room, PEERS, 5, engine_id="e", request_id="r")), parse_int=float)
    params["kvferry"]["num_tokens"] = int(params["kvferry"]["num_tokens"])  # what a proxy writes for 5.0
    assert proxy_params.handoff_of(params, 5).room_number == room


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("text", "Expected `object`, got `str`"),
        ({"room": 5, "peers": ["a:1"], "num_tokens": 5}, "Expected `str`, got `int`"),
        ({"room": "zz", "peers": ["a:1"], "num_tokens": 5}, "invalid literal"),
        ({"room": "0", "peers": ["a:1"], "num_tokens": 5}, "room 0, 1 peers"),
        ({"room": "1" + 16 * "0", "peers": ["a:1"], "num_tokens": 5}, "room 10000000000000000, 1 peers"),
        ({"room": "5", "peers": [], "num_tokens": 5}, "room 5, 0 peers"),
        ({"room": "5", "peers": ["a:1"], "num_tokens": 4}, "prefill offers 4 tokens, decode needs 5"),
    ],
)
def test_parameters_that_nobody_can_use_are_an_order_that_fails(entry, words):
    with pytest.raises(InputError, match=words):
        proxy_params.handoff_of({"kvferry": entry}, 5)
    consumer, asked = half("kv_consumer"), request(5, {"do_remote_prefill": True, "kvferry": entry})
    consumer.allocated(asked, [[3, 1]], 5)
    receive = consumer.take_orders().receives["r"]
    assert (receive.facts, receive.blocks) == (None, [3, 1])
    assert words.replace("`", "") in receive.problem.replace("`", "")


def test_parameters_of_another_connector_are_named():
    with pytest.raises(InputError, match=r"no entry 'kvferry' among \['do_remote_prefill', 'remote_block_ids'\]"):
        proxy_params.handoff_of({"remote_block_ids": [], "do_remote_prefill": True}, 5)
