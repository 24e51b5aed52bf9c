"""Decode receives into its pool in host memory, and takes a request to the device when there is room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from byte_compare import wait_for_records
from checks import check_at_once, check_setup
from matrix import ALWAYS_TO_HOST, SLOW, TO_HOST, TWO_RANKS
from models import references
from servers import Pair, Setup

StartPair = Callable[[Setup], Pair]

SETUPS = {
    "base": Setup(decode_args=ALWAYS_TO_HOST),
    "decode-prefix-cache": Setup(decode_args=(*ALWAYS_TO_HOST, "--disaggregation-decode-enable-radix-cache")),
    "page-64-to-16": Setup(prefill_args=("--page-size", "64"), decode_args=ALWAYS_TO_HOST),
    "window": Setup("sliding", "float32", decode_args=ALWAYS_TO_HOST),
    "tp-1-to-2": Setup(dtype="float32", decode_args=("--tp-size", "2", *ALWAYS_TO_HOST), decode_env=TWO_RANKS),
}


@pytest.mark.parametrize("name", SETUPS)
def test_tokens_and_bytes(name: str, start_pair: StartPair, model_folder: Callable[[str], Path]) -> None:
    setup = SETUPS[name]
    known = references(model_folder(setup.model), setup.dtype)
    pair = start_pair(setup)
    done = check_setup(pair, known, slow=name in SLOW)
    assert _pools(pair, [each.room for each in done]) == {"host"}


def test_some_requests_go_to_either_pool(start_pair: StartPair, model_folder: Callable[[str], Path]) -> None:
    """Once a third of the device's pages are taken, further requests are received beside them."""
    reference = references(model_folder("llama"), "bfloat16")[1]
    small = ("--max-total-tokens", "1024", "--num-reserved-decode-tokens", "1", *TO_HOST, "0.3")
    pair = start_pair(Setup(decode_args=small))
    done = check_at_once(pair, [reference], 8)
    assert _pools(pair, [each.room for each in done]) == {"device", "host"}


def _pools(pair: Pair, rooms: list[int]) -> set[str]:
    return {record.pool for room in rooms for record in wait_for_records(pair, room, "decode")}
