"""Two `vllm serve`, a proxy between them, and the OpenAI API: the same text as from one of them alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_process import ENVIRONMENT

START_LIMIT_S = 400.0
PROXY = Path(__file__).parents[2] / "examples/vllm_proxy.py"
WORDS = "the ferry crosses the river in the fog and its captain counts the bells from the other shore. "


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A process with an HTTP port."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        environment |= {"KVFERRY_CLAIM_TIMEOUT_S": "4", "KVFERRY_BOOTSTRAP_TIMEOUT_S": "4"}
        self.url, self.log = f"http://127.0.0.1:{port}", log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_ready(self, path: str) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            with contextlib.suppress(OSError):
                self.get(path)
                return
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.5)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **more}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def text(self, prompt: str, **more: Any) -> str:
        return self.complete(prompt, **more)["choices"][0]["text"]

    def metric(self, name: str, **labels: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name + "{")]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def serve(model: Path, role: str, policy: str, folder: Path) -> Server:
    transfer = {
        "kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.compat.vllm", "kv_role": role,
        "kv_connector_extra_config": {"engine": "local"}, "kv_load_failure_policy": policy,
    }  # fmt: skip
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32", "--block-size", "32",
        "--max-model-len", "512", "--num-gpu-blocks-override", "64", "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    return Server(command, port, folder / f"{role}.log")


@pytest.fixture(scope="module")
def servers(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill, decode, proxy."""
    folder = tmp_path_factory.mktemp("serve")
    prefill = serve(models / "tiny-llama", "kv_producer", "fail", folder)
    decode = serve(models / "tiny-llama", "kv_consumer", "recompute", folder)
    port = free_port()
    command = [sys.executable, str(PROXY), "--prefill", prefill.url, "--decode", decode.url, "--port", str(port)]
    proxy = Server(command, port, folder / "proxy.log")
    try:
        prefill.wait_ready("/health")
        decode.wait_ready("/health")
        yield prefill, decode, proxy
    finally:
        for server in (proxy, decode, prefill):
            server.close()


def loads(decode: Server) -> float:
    return decode.metric("kvferry:load_seconds_count")


def test_text_through_the_proxy_is_that_of_one_server(servers):
    prefill, decode, proxy = servers
    for number in range(3):
        prompt = f"{number} " + WORDS * (number + 1)
        assert proxy.text(prompt) == prefill.text(prompt)
    assert loads(decode) == 3
    assert decode.metric("kvferry:load_bytes_sum") >= 3 * 4 * 65536
    assert prefill.metric("kvferry:sends_total") == 3


def test_many_clients_at_once_and_a_stream(servers):
    prefill, decode, proxy = servers
    before = loads(decode)
    prompts = [f"client {number}: " + WORDS * (1 + number % 3) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(proxy.text, prompts))
    assert found == [prefill.text(prompt) for prompt in prompts]
    assert loads(decode) == before + 8
    body = {"model": "tiny", "prompt": "streamed " + WORDS, "max_tokens": 16, "temperature": 0, "stream": True,
            "ignore_eos": True}  # fmt: skip
    request = urllib.request.Request(
        proxy.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == prefill.text("streamed " + WORDS)


def test_a_prompt_whose_blocks_were_given_up_is_computed_and_counted(servers):
    prefill, decode, _ = servers
    prompt = "late " + WORDS * 2
    params = prefill.complete(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
    time.sleep(5)
    before = loads(decode)
    assert decode.text(prompt, kv_transfer_params=params) == prefill.text(prompt)
    assert loads(decode) == before
    assert decode.metric("kvferry:failures_total", what="load", code="no_claim") == 1
    assert prefill.metric("kvferry:failures_total", what="send", code="no_claim") == 1
