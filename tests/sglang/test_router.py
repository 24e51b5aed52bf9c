"""SGLang's own router in front of both servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client import generation, get_status, post
from models import references
from servers import START_LIMIT_S, Pair, Setup, free_port

StartPair = Callable[[Setup], Pair]


@pytest.fixture
def start_router(tmp_path: Path) -> Iterator[Callable[[Pair], int]]:
    """Starts a router; returns its port."""
    started: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "router.log"

    def start(pair: Pair) -> int:
        port = free_port()
        command = [
            sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation",
            "--prefill", f"http://127.0.0.1:{pair.prefill.port}", str(pair.bootstrap_port),
            "--decode", f"http://127.0.0.1:{pair.decode.port}", "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-port", str(free_port()), "--policy", "round_robin",
        ]  # fmt: skip
        with log.open("w") as output:
            started.append(subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True))
        deadline = time.monotonic() + START_LIMIT_S
        while get_status(port, "/readiness") != 200:
            assert started[-1].poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return port

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    print(log.read_text()[-4000:])


def test_requests_through_the_router(
    start_pair: StartPair, start_router: Callable[[Pair], int], model_folder: Callable[[str], Path]
) -> None:
    port = start_router(start_pair(Setup()))
    for reference in references(model_folder("llama"), "bfloat16"):
        answer = post(port, "/generate", generation(reference))
        assert answer.tokens == reference.tokens, answer
