"""Mistakes are planted, and the comparison of bytes must find them: else it would prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from byte_compare import differences
from client import exchange
from matrix import ALWAYS_TO_HOST
from models import references
from servers import Pair, Setup

StartPair = Callable[[Setup], Pair]
NO_CACHE = ("--disable-radix-cache",)
"""Each request is then computed, and carried whole."""


def test_an_element_that_is_not_copied(
    start_pair: StartPair, model_folder: Callable[[str], Path], orders: Path
) -> None:
    """One of thousands: the tokens are mostly right all the same."""
    pair = start_pair(Setup(args=NO_CACHE, env={"KVFERRY_ENGINE": "ordered", "KVFERRY_DIGEST": "off"}))
    reference = references(model_folder("llama"), "bfloat16")[1]
    assert not differences(pair, exchange(pair, reference))
    (orders / "drop_element").touch()
    assert len(differences(pair, exchange(pair, reference))) == 1


@pytest.mark.parametrize("decode_args", [(), ALWAYS_TO_HOST], ids=["device", "host"])
def test_two_pages_that_are_exchanged(
    decode_args: tuple[str, ...], start_pair: StartPair, model_folder: Callable[[str], Path], orders: Path
) -> None:
    pair = start_pair(Setup(args=NO_CACHE, decode_args=decode_args))
    reference = references(model_folder("llama"), "bfloat16")[1]
    (orders / "swap_pages").touch()
    done = exchange(pair, reference)
    assert not done.is_right, str(done)
    pages, tokens, heads = 2, 16, 2
    assert len(differences(pair, done)) == pages * tokens * heads


def test_the_canary_finds_the_element_too(
    start_pair: StartPair, model_folder: Callable[[str], Path], orders: Path
) -> None:
    """With kvferry's own check the request fails, with the reason in decode's log, and the next one is right."""
    pair = start_pair(Setup(args=NO_CACHE, env={"KVFERRY_ENGINE": "ordered", "KVFERRY_DIGEST": "full"}))
    reference = references(model_folder("llama"), "bfloat16")[1]
    (orders / "drop_element").touch()
    done = exchange(pair, reference)
    assert done.decode.status == 500, str(done)
    assert exchange(pair, reference).is_right
