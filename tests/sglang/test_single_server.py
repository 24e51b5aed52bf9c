"""The environment itself: one SGLang server on a CPU, without kvferry, generates what transformers generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from client import generation, post
from models import references
from servers import Server, Setup

SETUPS = {
    "llama": Setup(),
    "qwen3": Setup("qwen3", "float32"),
    "deepseek": Setup("deepseek", "float32", page_tokens=1),
    "sliding": Setup("sliding", "float32"),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_one_server_agrees_with_transformers(
    setup: Setup, start_server: Callable[[Setup], Server], model_folder: Callable[[str], Path]
) -> None:
    server = start_server(setup)
    for reference in references(model_folder(setup.model), setup.dtype):
        answer = post(server.port, "/generate", generation(reference))
        assert answer.tokens == reference.tokens, answer
