"""Real SGLang servers, in an environment of their own: `make sglang`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the zygote and the models are programs too

import models
from servers import HERE, SITE, Pair, Server, Setup, Zygote, environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def server_environment() -> dict[str, str]:
    """The environment of a process that imports SGLang."""
    return environment()


@pytest.fixture
def sglang_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang can be imported by the test itself."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.syspath_prepend(SITE)


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("zygote") / "zygote.log")
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def model_folder(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """The folder of a model, which is made once for all runs."""
    version = hashlib.sha256((HERE / "models.py").read_bytes()).hexdigest()[:12]
    cache = pytestconfig.cache.mkdir(f"sglang-models-{version}")

    def folder(name: str) -> Path:
        done = cache / f"{name}.done"
        if not done.exists():
            models.make_model(name, cache / name)
            done.touch()
        return cache / name

    return folder


@pytest.fixture
def start_server(
    zygote: Zygote, model_folder: Callable[[str], Path], tmp_path: Path
) -> Iterator[Callable[[Setup], Server]]:
    """Starts one server without disaggregation."""
    started: list[Server] = []

    def start(setup: Setup) -> Server:
        args = setup.common_args(model_folder(setup.model))
        started.append(Server(zygote, f"single{len(started)}", args, setup.env, tmp_path))
        started[-1].wait_healthy()
        return started[-1]

    yield start
    _end(started)


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """The folder in which a file is an order to the servers of this test, see site/orders.py."""
    folder = tmp_path / "orders"
    folder.mkdir()
    return folder


@pytest.fixture
def start_pair(
    zygote: Zygote, model_folder: Callable[[str], Path], tmp_path: Path, orders: Path
) -> Iterator[Callable[[Setup], Pair]]:
    """Starts a prefill and a decode server. What they logged is shown if the test fails."""
    started: list[Pair] = []

    def start(setup: Setup) -> Pair:
        started.append(Pair(zygote, setup, model_folder(setup.model), tmp_path, orders))
        started[-1].wait_healthy()
        return started[-1]

    yield start
    _end([server for pair in started for server in pair.servers])


def _end(servers: list[Server]) -> None:
    """Kill all, then show their logs: pytest prints what a fixture printed if the test fails."""
    for server in servers:
        server.kill()
    for server in servers:
        print(server.tail())
