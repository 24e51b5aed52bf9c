"""What goes wrong between two engines costs time or the request, and never gives a wrong token."""

from __future__ import annotations

import copy
import time

import pytest


def recomputes(engine, alone, tokens, params, words):
    """The load fails for the reason, the tokens are right, now and from the prefix cache."""
    engine.call("warnings")
    expected = alone.generate(tokens, 12).tokens
    assert engine.generate(tokens, 12, params).tokens == expected
    said = "\n".join(engine.call("warnings"))
    assert engine.call("loads") == []
    for word in words:
        assert word in said, said
    assert engine.generate(tokens, 12).tokens == expected


def with_peer(params, peer):
    changed = copy.deepcopy(params)
    changed["kvferry"]["peers"] = [peer]
    return changed


def test_nobody_listens_at_the_peer(alone, prefill, decode, strict, prompt):
    tokens = prompt(150)
    params = with_peer(prefill.prefill(tokens), "tcp://127.0.0.1:1")
    recomputes(decode, alone, tokens, params, ["127.0.0.1:1"])
    assert strict.generate(tokens, 12, params).finish_reason == "error"
    prefill.until("requests", 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda params: params.pop("kvferry"), "no entry 'kvferry'"),
        (lambda params: params["kvferry"].update(peers=[]), "0 peers"),
        (lambda params: params["kvferry"].update(peers=["nonsense"]), "'nonsense' is not host:port"),
        (lambda params: params["kvferry"].update(room="xyz"), "xyz"),
        (lambda params: params["kvferry"].update(num_tokens=7), "prefill offers 7 tokens, decode needs 150"),
        (lambda params: params["kvferry"].update(room=7), "Expected `str`"),
    ],
)
def test_parameters_that_a_proxy_has_spoilt(alone, prefill, decode, strict, prompt, change, words):
    tokens = prompt(150)
    params = prefill.prefill(tokens)
    change(params)
    recomputes(decode, alone, tokens, copy.deepcopy(params), [words])
    assert strict.generate(tokens, 12, params).finish_reason == "error"
    prefill.until("requests", 0)


def test_parameters_of_another_request_of_the_same_length(alone, prefill, decode, prompt):
    tokens, other = prompt(150), prompt(150)
    params, others = prefill.prefill(tokens), prefill.prefill(other)
    recomputes(decode, alone, tokens, others, ["tag"])
    recomputes(decode, alone, other, params, ["tag"])
    prefill.until("requests", 0)


def test_the_producer_has_reused_the_blocks_when_the_consumer_comes(alone, prefill, decode, strict, prompt):
    tokens = prompt(300)
    params = prefill.prefill(tokens)
    prefill.until("requests", 0)  # nobody came within claim_timeout_s
    for _ in range(8):
        prefill.generate(prompt(300), 1)
    recomputes(decode, alone, tokens, params, ["no_claim"])
    assert strict.generate(tokens, 12, params).finish_reason == "error"


def test_a_killed_producer_and_its_successor_at_the_same_address(alone, decode, start, prompt):
    tokens = prompt(150)
    settings = {"control_ports": "41877"}
    first = start("kv_producer", settings=settings)
    params = first.prefill(tokens)
    first.kill()
    recomputes(decode, alone, tokens, params, ["127.0.0.1:41877"])
    second = start("kv_producer", settings=settings)
    other = prompt(150)
    assert decode.generate(other, 12, second.prefill(other)).tokens == alone.generate(other, 12).tokens
    assert len(decode.call("loads")) == 1
    recomputes(decode, alone, prompt(150), params, ["failed"])  # a room of the first one
    second.close()


def test_a_client_that_goes_away_while_its_prompt_is_loaded(alone, prefill, decode, prompt):
    tokens, other = prompt(300), prompt(300)
    free = decode.call("free_blocks"), prefill.call("free_blocks")
    params = prefill.prefill(tokens)
    decode.call("hold_back", True)
    gone = decode.add(tokens, 12, params)
    decode.call("step_once")
    decode.call("abort", gone)
    decode.call("hold_back", False)
    decode.until("requests", 0)
    prefill.until("requests", 0)
    assert (decode.call("free_blocks"), prefill.call("free_blocks")) == free
    assert decode.generate(other, 12, prefill.prefill(other)).tokens == alone.generate(other, 12).tokens


def test_a_client_that_goes_away_before_its_prompt_is_loaded(alone, prefill, decode, prompt):
    tokens = prompt(300)
    params = prefill.prefill(tokens)
    decode.call("hold_back", True)
    decode.call("abort", decode.add(tokens, 12, params))
    decode.call("hold_back", False)
    started = time.monotonic()
    prefill.until("requests", 0)
    assert time.monotonic() - started < 1.5, "the producer has waited for its claim_timeout_s"
    assert prefill.call("warnings") == []
    decode.until("requests", 0)


def test_block_sizes_differ(alone, prefill, start, prompt):
    engine = start("kv_consumer", policy="recompute", block_size=64)
    tokens = prompt(200)
    words = ["granule_tokens of field 'kv'", "prefill has 32, decode has 64"]
    recomputes(engine, alone, tokens, prefill.prefill(tokens), words)
    engine.close()


def test_models_differ(prefill, start, prompt):
    right = start(None, model="tiny-other")
    engine = start("kv_consumer", model="tiny-other", policy="recompute")
    tokens = prompt(200)
    recomputes(engine, right, tokens, prefill.prefill(tokens), ["'tiny-llama@", "'tiny-other@"])
    engine.close()
    right.close()


def test_models_of_one_name_differ(prefill, start, prompt):
    """Two checkpoints of one training, say: only their weights are different."""
    right = start(None, model="again/tiny-llama")
    engine = start("kv_consumer", model="again/tiny-llama", policy="recompute")
    tokens = prompt(200)
    recomputes(engine, right, tokens, prefill.prefill(tokens), ["'tiny-llama@"] * 2)
    engine.close()
    right.close()
