"""Two vLLM engines with KVFerryConnector against one without: the same greedy tokens, whatever travels."""

from __future__ import annotations

import numpy as np
import pytest

BLOCK = 32
BLOCK_BYTES = 4 * 2 * BLOCK * 64 * 4
"""Layers, heads, tokens, elements of K and V, bytes of one."""


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 200, 333])
def test_tokens_are_those_of_one_engine(alone, prefill, decode, prompt, length):
    tokens = prompt(length)
    found = decode.generate(tokens, 16, prefill.prefill(tokens))
    assert found.tokens == alone.generate(tokens, 16).tokens
    assert decode.call("loads") == [-(-length // BLOCK) * BLOCK_BYTES]
    prefill.until("requests", 0)


def test_tokens_differ_when_two_blocks_are_exchanged(alone, prefill, decode, prompt):
    tokens = prompt(200)
    decode.call("swap", True)
    try:
        found = decode.generate(tokens, 16, prefill.prefill(tokens))
    finally:
        decode.call("swap", False)
    assert found.tokens != alone.generate(tokens, 16).tokens
    assert decode.call("loads") == [7 * BLOCK_BYTES]


def test_only_what_the_decode_side_does_not_have_travels(alone, prefill, decode, prompt):
    first = prompt(200)
    second = prompt(200, first[:100])
    decode.generate(first, 4, prefill.prefill(first))
    decode.call("loads")
    for tokens, blocks in ((second, 4), (first, 1)):  # 96 tokens are 3 blocks; of the same prompt an open block is left
        found = decode.generate(tokens, 16, prefill.prefill(tokens))
        assert found.tokens == alone.generate(tokens, 16).tokens
        assert decode.call("loads") == [blocks * BLOCK_BYTES]


def test_several_requests_are_in_flight_on_both_sides(alone, prefill, decode, prompt):
    shared = prompt(64)
    prompts = [prompt(length, shared if length % 2 else None) for length in (70, 91, 120, 155, 64, 129)]
    asked = [prefill.add(tokens, 1, {"do_remote_decode": True}) for tokens in prompts]
    params = [prefill.finish(req_id).params for req_id in asked]
    loading = [decode.add(tokens, 12, param) for tokens, param in zip(prompts, params, strict=True)]
    found = [decode.finish(req_id).tokens for req_id in loading]
    assert found == [alone.generate(tokens, 12).tokens for tokens in prompts]
    assert decode.call("warnings") == []
    prefill.until("requests", 0)
    decode.until("requests", 0)


def test_fifty_requests_are_in_flight(alone, decode, start, prompt):
    """More than either pool has blocks for: some are loading or answered while others are computed or wait."""
    prefill = start("kv_producer", max_num_batched_tokens=64, settings={"claim_timeout_s": 60})
    shared = prompt(64)
    prompts = [prompt(40 + 3 * number, shared if number > 10 and number % 3 == 0 else None) for number in range(50)]
    expected = [alone.add(tokens, 8) for tokens in prompts]
    asked = [prefill.add(tokens, 1, {"do_remote_decode": True}) for tokens in prompts]
    loading = [
        decode.add(tokens, 8, prefill.finish(req_id).params) for tokens, req_id in zip(prompts, asked, strict=True)
    ]
    assert [decode.finish(req_id).tokens for req_id in loading] == [alone.finish(each).tokens for each in expected]
    assert decode.call("warnings") == prefill.call("warnings") == []
    assert len(decode.call("loads")) == 50
    prefill.until("requests", 0)
    decode.until("requests", 0)
    prefill.close()


def test_a_request_without_parameters_is_served_as_ever(alone, decode, prompt):
    tokens = prompt(90)
    assert decode.generate(tokens, 8).tokens == alone.generate(tokens, 8).tokens
    assert decode.call("loads") == []


def test_an_engine_of_both_roles_prefills_and_decodes(alone, prefill, decode, start, prompt):
    both = start("kv_both").wait_ready()
    for sender, receiver in ((both, decode), (prefill, both)):
        tokens = prompt(120)
        assert receiver.generate(tokens, 16, sender.prefill(tokens)).tokens == alone.generate(tokens, 16).tokens
        assert len(receiver.call("loads")) == 1
        sender.until("requests", 0)
    both.close()


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1)])
def test_tensor_parallel_sizes_may_differ(alone, prefill, decode, start, prompt, prefill_ranks, decode_ranks):
    two = start(
        "kv_producer" if prefill_ranks == 2 else "kv_consumer", tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )  # fmt: skip
    sender, receiver = (two, decode) if prefill_ranks == 2 else (prefill, two.wait_ready())
    for tokens in (prompt(200), prompt(77)):
        params = sender.prefill(tokens)
        assert len(params["kvferry"]["peers"]) == prefill_ranks
        assert receiver.generate(tokens, 16, params).tokens == alone.generate(tokens, 16).tokens
    sender.until("requests", 0)
    assert receiver.call("warnings") == sender.call("warnings") == []
    two.close()


def test_the_cache_of_two_bfloat16_ranks_is_that_of_one_up_to_rounding(start, prompt):
    """Two ranks add up in another order, so a near tie may give another token: what came is compared itself."""
    two = start(
        "kv_producer", dtype="bfloat16", tensor_parallel_size=2, distributed_executor_backend="mp",
    )  # fmt: skip
    receiver, one = start("kv_consumer", dtype="bfloat16"), start(None, dtype="bfloat16")
    tokens = prompt(200)
    receiver.generate(tokens, 1, two.prefill(tokens))
    one.generate(tokens, 1)
    assert len(receiver.call("loads")) == 1
    for got, own in zip(*(np.array(engine.call("kv_cache")) for engine in (receiver, one)), strict=True):
        assert len(own) == 6 * 2 * 32 * 64
        assert np.corrcoef(got, own)[0, 1] > 0.999
        assert np.corrcoef(got, own.reshape(6, 2, -1)[:, ::-1].ravel())[0, 1] < 0.5, "heads exchanged would be seen"
    for engine in (two, receiver, one):
        engine.close()


def test_a_load_that_fails_on_both_ranks_is_computed(alone, prefill, start, prompt):
    two = start("kv_consumer", policy="recompute", tensor_parallel_size=2, distributed_executor_backend="mp")
    for spoilt, tokens in ((True, prompt(200)), (False, prompt(90))):
        two.wait_ready()
        params = prefill.prefill(tokens)
        if spoilt:
            params["kvferry"]["room"] = "1"
        assert two.generate(tokens, 16, params).tokens == alone.generate(tokens, 16).tokens
    two.close()


@pytest.mark.parametrize("length", [1, 2, 40, 64, 65, 95, 96, 97, 128, 250])
def test_a_model_with_two_kinds_of_layers(windows, prompt, length):
    """Full attention and windows of 64 tokens: two groups of block tables over one pool, in vLLM's hybrid manager."""
    alone, prefill, decode = windows
    tokens = prompt(length)
    found = decode.generate(tokens, 16, prefill.prefill(tokens))
    assert found.tokens == alone.generate(tokens, 16).tokens
    assert len(decode.call("loads")) == 1
    assert decode.call("warnings") == []
    prefill.until("requests", 0)


def test_what_is_loaded_for_two_kinds_of_layers(windows, prompt):
    alone, prefill, decode = windows
    tokens = prompt(250)  # 249 travel: 8 blocks of all tokens, the last 63 tokens are in 3 blocks
    decode.generate(tokens, 4, prefill.prefill(tokens))
    assert decode.call("loads") == [(8 + 3) * BLOCK_BYTES // 2]
    longer = tokens + prompt(50)
    found = decode.generate(longer, 16, prefill.prefill(longer))
    assert found.tokens == alone.generate(longer, 16).tokens
    (loaded,) = decode.call("loads")
    assert loaded <= (3 + 3) * BLOCK_BYTES // 2


def test_a_failed_load_of_two_kinds_of_layers_is_computed(windows, prompt):
    alone, prefill, decode = windows
    tokens = prompt(250)
    params = prefill.prefill(tokens)
    params["kvferry"]["room"] = "1"
    assert decode.generate(tokens, 16, params).tokens == alone.generate(tokens, 16).tokens
    assert decode.call("loads") == []
    assert len(decode.call("warnings")) == 1
