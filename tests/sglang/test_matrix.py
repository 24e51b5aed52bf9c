"""Real servers in many setups: tokens equal to those of transformers, and every byte of decode's equal to prefill's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from byte_compare import wait_for_records
from checks import check_in_turn, check_setup
from matrix import SETUPS, SLOW
from models import references
from servers import ENGINE, Pair, Setup

StartPair = Callable[[Setup], Pair]


@pytest.mark.parametrize("name", SETUPS)
def test_tokens_and_bytes(name: str, start_pair: StartPair, model_folder: Callable[[str], Path]) -> None:
    setup = SETUPS[name]
    known = references(model_folder(setup.model), setup.dtype)
    pair = start_pair(setup)
    check_setup(pair, known, slow=name in SLOW)
    for server in pair.servers:
        assert f", engine {ENGINE}, at tcp://" in server.log.read_text()


def test_prefill_sends_what_it_had_cached(start_pair: StartPair, model_folder: Callable[[str], Path]) -> None:
    known = references(model_folder("llama"), "bfloat16")
    done = check_in_turn(start_pair(Setup()), known, rounds=2)
    cached = [each.prefill.body["meta_info"]["cached_tokens"] for each in done]
    assert cached[:3] == [0, 0, 0]
    assert all(count >= each.prompt_tokens - 17 for count, each in zip(cached[3:], done[3:], strict=True))


def test_decode_keeps_its_prefix(start_pair: StartPair, model_folder: Callable[[str], Path]) -> None:
    known = references(model_folder("llama"), "bfloat16")
    pair = start_pair(SETUPS["decode-prefix-cache"])
    done = check_in_turn(pair, known, rounds=2)
    kept = [wait_for_records(pair, each.room, "decode")[0].prefix_tokens for each in done]
    assert kept[:3] == [0, 0, 0]
    assert all(count >= each.prompt_tokens - 17 for count, each in zip(kept[3:], done[3:], strict=True))
