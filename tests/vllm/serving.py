"""`vllm serve` processes, and what is asked of them over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from engine_process import ENGINE, ENVIRONMENT

START_LIMIT_S = 400.0
PROXY = Path(__file__).parents[2] / "examples/vllm_proxy.py"
NAME = "served"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A process with an HTTP port."""

    def __init__(self, command: list[str], port: int, log: Path, more: Mapping[str, str] | None = None) -> None:
        environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        environment |= more or {}
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

    def post(self, path: str, **body: Any) -> HTTPResponse:
        request = urllib.request.Request(
            self.url + path, json.dumps({"model": NAME, **body}).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=60)

    def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **more}
        with self.post("/v1/completions", **body) as answer:
            return json.load(answer)

    def text(self, prompt: str, **more: Any) -> str:
        return self.complete(prompt, **more)["choices"][0]["text"]

    def events(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """What a streamed answer says, as it comes."""
        with self.post(path, stream=True, **body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

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


def serve(model: Path, connector: Mapping[str, Any], name: str, folder: Path, env: Mapping[str, str]) -> Server:
    """`vllm serve` with a connector; its log is NAME.log in the folder."""
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32", "--block-size", "32",
        "--max-model-len", "1024", "--num-gpu-blocks-override", "128", "--kv-transfer-config", json.dumps(connector),
    ]  # fmt: skip
    return Server(command, port, folder / f"{name}.log", env)


def kvferry(role: str, policy: str) -> dict[str, Any]:
    """The configuration of our connector."""
    return {
        "kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.compat.vllm", "kv_role": role,
        "kv_connector_extra_config": {"engine": ENGINE}, "kv_load_failure_policy": policy,
    }  # fmt: skip


def proxy_between(prefill: Server, decode: Server, log: Path) -> Server:
    """The proxy of the examples."""
    port = free_port()
    command = [sys.executable, str(PROXY), "--prefill", prefill.url, "--decode", decode.url, "--port", str(port)]
    return Server(command, port, log)
