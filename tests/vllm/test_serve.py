"""Two `vllm serve` with SmolLM2, a proxy between them, and the OpenAI API: the same text as from one of them alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import Server, kvferry, proxy_between, serve

WORDS = "the ferry crosses the river in the fog and its captain counts the bells from the other shore. "
BEGINNINGS = ("Once upon a time, ", "A list of European capitals: ", "def fibonacci(n): # ")
BLOCK_BYTES = 30 * 3 * 32 * 2 * 64 * 4
"""Layers, KV heads, tokens, K and V, dimension, float32."""
ENVIRONMENT = {"KVFERRY_CLAIM_TIMEOUT_S": "8", "KVFERRY_BOOTSTRAP_TIMEOUT_S": "8"}


@pytest.fixture(scope="module")
def servers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill, decode, proxy."""
    folder = tmp_path_factory.mktemp("serve")
    prefill = serve(smollm2, kvferry("kv_producer", "fail"), "prefill", folder, ENVIRONMENT)
    decode = serve(smollm2, kvferry("kv_consumer", "recompute"), "decode", folder, ENVIRONMENT)
    proxy = proxy_between(prefill, decode, folder / "proxy.log")
    try:
        prefill.wait_ready("/health")
        decode.wait_ready("/health")
        yield prefill, decode, proxy
    finally:
        for server in (proxy, decode, prefill):
            server.close()


def loads(decode: Server) -> float:
    return decode.metric("kvferry:load_seconds_count")


def test_text_through_the_proxy_is_that_of_one_server(servers):
    prefill, decode, proxy = servers
    prompts = [begin + WORDS * (number + 1) for number, begin in enumerate(BEGINNINGS)]
    said = [proxy.text(prompt) for prompt in prompts]
    assert said == [prefill.text(prompt) for prompt in prompts]
    assert len(set(said)) == 3
    assert loads(decode) == 3
    assert decode.metric("kvferry:load_bytes_sum") >= 3 * BLOCK_BYTES
    assert prefill.metric("kvferry:sends_total") == 3


def chat(server: Server, question: str) -> str:
    """A streamed answer."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
    events = server.events("/v1/chat/completions", **body)
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


def test_chat_through_the_proxy_is_that_of_one_server(servers):
    prefill, decode, proxy = servers
    before = loads(decode)
    questions = ("What is the capital of France?", "Write one sentence about a ferry that crosses a river.")
    said = [chat(proxy, question) for question in questions]
    assert said == [chat(prefill, question) for question in questions]
    assert "Paris" in said[0]
    assert loads(decode) == before + 2


def test_many_clients_at_once_and_a_stream(servers):
    prefill, decode, proxy = servers
    before = loads(decode)
    prompts = [f"client {number}: " + WORDS * (1 + number % 3) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(proxy.text, prompts))
    assert found == [prefill.text(prompt) for prompt in prompts]
    assert loads(decode) == before + 8
    body = {"prompt": "streamed " + WORDS, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    events = [event["choices"][0]["text"] for event in proxy.events("/v1/completions", **body)]
    assert len(events) > 1
    assert "".join(events) == prefill.text("streamed " + WORDS)


def test_a_prompt_whose_blocks_were_given_up_is_computed_and_counted(servers):
    prefill, decode, _ = servers
    prompt = "late " + WORDS * 2
    params = prefill.complete(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
    time.sleep(9)
    before = loads(decode)
    assert decode.text(prompt, kv_transfer_params=params) == prefill.text(prompt)
    assert loads(decode) == before
    assert decode.metric("kvferry:failures_total", what="load", code="no_claim") == 1
    assert prefill.metric("kvferry:failures_total", what="send", code="no_claim") == 1
