"""Engines that several tests share; vLLM is imported in their processes only, so that any environment collects this."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # child processes import the modules beside this file

from engine_process import Engine

from kvferry.serve.transformers_folder import write_folder
from kvferry.serve.weights import find_model

SETTINGS = {"claim_timeout_s": 3.0, "bootstrap_timeout_s": 3.0}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(Path(__file__).parent / "tiny_models.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, as a folder that vLLM loads."""
    folder = tmp_path_factory.mktemp("smollm2")
    write_folder(find_model(None), folder)
    return folder


@pytest.fixture(scope="session")
def engines() -> Iterator[list[Engine]]:
    """All that were started; they end with the session."""
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.close()


@pytest.fixture(autouse=True)
def nothing_of_earlier_tests(engines: list[Engine]) -> None:
    for engine in engines:
        engine.forget()


@pytest.fixture(scope="session")
def start(models: Path, engines: list[Engine]) -> Callable[..., Engine]:
    def begin(role: str | None = None, model: str = "tiny-llama", **options: Any) -> Engine:
        engines.append(Engine(str(models / model), role, settings=SETTINGS | options.pop("settings", {}), **options))
        return engines[-1]

    return begin


@pytest.fixture(scope="session")
def alone(start: Callable[..., Engine]) -> Engine:
    """VLLM by itself: what is right."""
    return start()


@pytest.fixture(scope="session")
def prefill(start: Callable[..., Engine]) -> Engine:
    """It computes every prompt in chunks of 64 tokens."""
    return start("kv_producer", max_num_batched_tokens=64)


@pytest.fixture(scope="session")
def decode(start: Callable[..., Engine]) -> Engine:
    return start("kv_consumer", policy="recompute")


@pytest.fixture(scope="session")
def strict(start: Callable[..., Engine]) -> Engine:
    """A decode engine that fails a request whose load failed."""
    return start("kv_consumer", policy="fail")


@pytest.fixture(scope="module")
def windows(start: Callable[..., Engine]) -> Iterator[tuple[Engine, Engine, Engine]]:
    """One engine, prefill and decode of a model with two kinds of layers."""
    model, chunked = "tiny-windows", {"max_num_batched_tokens": 64}
    made = (
        start(None, model, **chunked), start("kv_producer", model, **chunked),
        start("kv_consumer", model, policy="recompute", **chunked),
    )  # fmt: skip
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[..., list[int]]:
    """Prompts that no other test has."""
    generator = random.Random(request.node.nodeid)

    def make(length: int, begin: list[int] | None = None) -> list[int]:
        start = begin or []
        return start + [generator.randrange(1024) for _ in range(length - len(start))]

    return make
