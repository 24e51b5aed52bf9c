"""The two sides of a request do not come at the same time, and not from the same two servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checks import check, check_at_once
from client import Answer, Exchange, at_once, generation, new_room, post
from models import Reference, references
from servers import Pair, Setup

StartPair = Callable[[Setup], Pair]
LATE_S = 1.5
EARLY_PREFILL = {
    "waits": Setup(),
    "computes-before": Setup(prefill_args=("--optimistic-prefill-attempts", "2")),
    "computes-chunks-before": Setup(
        prefill_args=("--optimistic-prefill-attempts", "2", "--chunked-prefill-size", "64")
    ),
}


@pytest.fixture
def known(model_folder: Callable[[str], Path]) -> list[Reference]:
    return references(model_folder("llama"), "bfloat16")


def exchange_late(pair: Pair, reference: Reference, late: str) -> Exchange:
    """One request that reaches one side LATE_S after the other one."""
    room = new_room()
    body = generation(reference, **pair.rendezvous(room))

    def ask(side: str) -> Answer:
        if side == late:
            time.sleep(LATE_S)
        return post(getattr(pair, side).port, "/generate", body)

    prefill, decode = at_once([lambda: ask("prefill"), lambda: ask("decode")])
    return Exchange(room, reference, prefill, decode)


@pytest.mark.parametrize("name", EARLY_PREFILL)
def test_decode_comes_late(name: str, start_pair: StartPair, known: list[Reference]) -> None:
    pair = start_pair(EARLY_PREFILL[name])
    for reference in known:
        check(pair, exchange_late(pair, reference, "decode"))


def test_prefill_comes_late(start_pair: StartPair, known: list[Reference]) -> None:
    pair = start_pair(Setup())
    for reference in known:
        check(pair, exchange_late(pair, reference, "prefill"))


def test_two_servers_of_each_side(start_pair: StartPair, known: list[Reference]) -> None:
    """Each prefill server with each decode server, all at once."""
    pairs = [start_pair(Setup()), start_pair(Setup())]
    mixed = [prefill.with_decode_of(decode) for prefill in pairs for decode in pairs]
    at_once([lambda pair=pair: check_at_once(pair, known, 3) for pair in mixed])
