"""Decode gives back a running request's pages, and takes the request up again."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checks import check, check_at_once
from client import Answer, Exchange, generation, new_room, post, stream
from models import NEW_TOKENS, Reference, references
from servers import Pair, Setup

StartPair = Callable[[Setup], Pair]


def test_decode_runs_out_of_memory(start_pair: StartPair, model_folder: Callable[[str], Path]) -> None:
    """Eight requests where five have room: some are kept in host memory meanwhile."""
    small = ("--max-total-tokens", "1024", "--num-reserved-decode-tokens", "1")
    pair = start_pair(Setup(page_tokens=1, decode_args=small))
    done = check_at_once(pair, [references(model_folder("llama"), "bfloat16")[1]], 8)
    assert sum(each.decode.body["meta_info"]["num_retractions"] for each in done) > 0


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_prefill_computes_once_more(
    page_tokens: int, start_pair: StartPair, model_folder: Callable[[str], Path]
) -> None:
    """Decode is paused and drops its pages; then it has prefill compute the prompt, and what it had generated, anew."""
    pair = start_pair(Setup(dtype="float32", page_tokens=page_tokens))
    for reference in references(model_folder("llama"), "float32"):
        # a request may be over before the pause has come
        assert any(retractions_of_a_paused_request(pair, reference) == 1 for _ in range(6))


def retractions_of_a_paused_request(pair: Pair, reference: Reference) -> int:
    """Pause decode as soon as it has generated a token, and go on; all tokens must be right."""
    room, begun_s = new_room(), time.monotonic()
    body = generation(reference, **pair.rendezvous(room))
    with ThreadPoolExecutor(1) as other:
        prefill = other.submit(post, pair.prefill.port, "/generate", body)
        events = stream(pair.decode.port, "/generate", body)
        event = next(events)
        assert post(pair.decode.port, "/pause_generation", {"mode": "retract"}).status == 200
        assert post(pair.decode.port, "/continue_generation", {}).status == 200
        for event in events:
            if len(event["output_ids"]) == NEW_TOKENS:
                break
        decode = Answer(200, event, time.monotonic() - begun_s)
        check(pair, Exchange(room, reference, prefill.result(), decode))
    return int(event["meta_info"]["num_retractions"])
