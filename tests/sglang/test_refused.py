"""What can't be carried is refused, in words that name it: by SGLang at start, or by kvferry at the handshake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from client import exchange
from matrix import SEQUENTIAL, TWO_RANKS
from models import references
from servers import Pair, Setup

StartPair = Callable[[Setup], Pair]
HASTY = {"KVFERRY_CLAIM_TIMEOUT_S": "4"}
"""Prefill waits for another claim after one that it had to refuse."""


def test_the_policy_that_sglang_has_for_one_backend_only(start_pair: StartPair) -> None:
    setup = Setup(args=("--disaggregation-decode-allocation-policy", "prefill_complete"))
    with pytest.raises(AssertionError, match="prefill_complete does not yet support transfer backends other than"):
        start_pair(setup)


def test_a_registry_that_all_the_world_can_write_to(start_pair: StartPair) -> None:
    with pytest.raises(AssertionError, match="KVFERRY_SECRET"):
        start_pair(Setup(args=("--host", "0.0.0.0")))


def test_windows_whose_layers_are_shared_out(start_pair: StartPair) -> None:
    """SGLang does not say which layers the regions of a stage belong to."""
    stages = ("--pp-size", "2", *SEQUENTIAL)
    with pytest.raises(AssertionError, match="serve this model with --pp-size 1"):
        start_pair(Setup("sliding", "float32", prefill_args=stages, prefill_env=TWO_RANKS))


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        pytest.param(
            Setup(prefill_args=("--dtype", "float32"), env=HASTY), "use the same", id="bytes-of-elements-differ"
        ),
        pytest.param(
            Setup(prefill_args=("--dtype", "float16"), env=HASTY), "use the same", id="dtypes-of-equal-size-differ"
        ),
    ],
)
def test_layouts_that_do_not_fit(
    setup: Setup, words: str, start_pair: StartPair, model_folder: Callable[[str], Path]
) -> None:
    pair = start_pair(setup)
    done = exchange(pair, references(model_folder(setup.model), setup.dtype)[0])
    for answer in (done.prefill, done.decode):
        assert answer.status == 500, str(done)
        assert words in answer.body["message"], str(done)
    assert [server.name for server in pair.servers if not server.is_alive()] == []


def test_a_room_number_that_two_requests_have(start_pair: StartPair, model_folder: Callable[[str], Path]) -> None:
    """Prompts of other tokens are never joined, and the number is free again afterwards."""
    first, second, _ = references(model_folder("llama"), "bfloat16")
    pair = start_pair(Setup())
    room = exchange(pair, first).room
    done = exchange(pair, second, room)
    assert done.is_right, str(done)
