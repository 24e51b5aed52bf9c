"""SGLang servers on this machine: started from the zygote, one alone or a prefill and a decode server."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client import get_status

HERE = Path(__file__).parent
SITE = HERE / "site"
"""Goes on the path of all processes that import SGLang."""
ENGINE = os.environ.get("FERRY_TEST_ENGINE", "local")
"""The transfer engine of all servers that don't name one; `make sglang` runs all tests with each."""
START_LIMIT_S = 90.0
_PORTS = range(20000, 30000)
"""Below those that the system gives to connections."""
_ARGS = [
    "--device", "cpu", "--skip-tokenizer-init", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", "--host", "127.0.0.1",
    "--random-seed", "1", "--max-total-tokens", "8192", "--max-running-requests", "8", "--mem-fraction-static", "0.1",
    "--sleep-on-idle",
]  # fmt: skip
_ENV = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20",
    "KVFERRY_BOOTSTRAP_TIMEOUT_S": "15",
    "KVFERRY_CLAIM_TIMEOUT_S": "15",
    "KVFERRY_STALL_S": "15",
    "KVFERRY_ENGINE": ENGINE,
    "FERRY_TEST_ENGINE": ENGINE,
}


@dataclass(frozen=True)
class Setup:
    """How servers are started.

    Attributes:
        model: name of the model, see models.py.
        dtype: of weights and cache.
        page_tokens: tokens per page.
        backend: the transfer backend.
        args: arguments of both servers; prefill_args, decode_args: of one.
        env: environment of both; prefill_env, decode_env: of one.
    """

    model: str = "llama"
    dtype: str = "bfloat16"
    page_tokens: int = 16
    backend: str = "kvferry"
    args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    prefill_env: Mapping[str, str] = field(default_factory=dict)
    decode_env: Mapping[str, str] = field(default_factory=dict)

    def common_args(self, model_folder: Path) -> list[str]:
        """Arguments of any server of this setup."""
        chosen = ["--model-path", str(model_folder), "--dtype", self.dtype, "--page-size", str(self.page_tokens)]
        return [*_ARGS, *chosen, *self.args]


class Zygote:
    """The process that servers are forked from. Killing it, or this process, ends all servers."""

    def __init__(self, log: Path) -> None:
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "zygote.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, env=environment(), start_new_session=True,
            )  # fmt: skip
        if (said := self._answer()) != "ready":
            raise RuntimeError(f"the zygote said {said!r}, its log: {log.read_text()[-4000:]}")

    def fork(self, args: Sequence[str], env: Mapping[str, str], log: Path) -> int:
        """Start a server; returns the number of its session."""
        assert self._process.stdin is not None
        request = {"args": list(args), "env": {**_ENV, **env}, "log": str(log)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def close(self) -> None:
        """End it and all that it has started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Server:
    """One SGLang server: a session of processes."""

    def __init__(
        self, zygote: Zygote, name: str, args: Sequence[str], env: Mapping[str, str], folder: Path, port: int = 0
    ) -> None:
        self.name = name
        self.port = port or free_port()
        self.log = folder / f"{name}.log"
        self._again: Callable[[], Server] = lambda: Server(zygote, name, args, env, folder, self.port)
        self.session = zygote.fork([*args, "--port", str(self.port)], env, self.log)

    def is_alive(self) -> bool:
        """Whether its first process runs."""
        try:
            stat = Path(f"/proc/{self.session}/stat").read_text()
        except OSError:
            return False
        return stat.rsplit(")", 1)[1].split()[0] != "Z"

    def wait_healthy(self, limit_s: float = START_LIMIT_S) -> None:
        """Until it answers. Raises AssertionError with its log if it ends or takes too long."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self.is_alive():
            if get_status(self.port, "/health") == 200:
                return
            time.sleep(0.05)
        what = f"did not answer within {limit_s} s" if self.is_alive() else "ended"
        raise AssertionError(f"{self.name} {what}: {self.tail()}")

    def processes(self) -> dict[int, str]:
        """pid -> command line of all its processes; the ended ones that nobody has asked for yet have none."""
        found = {}
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.getsid(int(entry)) == self.session:
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return {pid: command for pid, command in found.items() if command}

    def kill(self) -> None:
        """End all its processes, at once."""
        deadline = time.monotonic() + 10.0
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            time.sleep(0.02)
        assert not left, f"{self.name} does not end: {left}"

    def restarted(self) -> Server:
        """The same server again, on the same port, healthy."""
        self.kill()
        again = self._again()
        again.wait_healthy()
        return again

    def tail(self, chars: int = 6000) -> str:
        """The end of its log, and the first exception in it."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        _, mark, trace = text[:-chars].partition("Traceback")
        return f"\n---- {self.log} ----\n{mark}{trace[:chars]}\n...\n{text[-chars:]}"


class Pair:
    """A prefill and a decode server."""

    def __init__(self, zygote: Zygote, setup: Setup, model_folder: Path, folder: Path, orders: Path) -> None:
        self.setup = setup
        self.bootstrap_port = free_port()
        self.records = folder / "records"
        self.records.mkdir(exist_ok=True)
        common = [
            *setup.common_args(model_folder), "--disaggregation-transfer-backend", setup.backend,
            "--disaggregation-bootstrap-port", str(self.bootstrap_port),
        ]  # fmt: skip
        env = {"FERRY_TEST_RECORDS": str(self.records), "FERRY_TEST_ORDERS": str(orders), **setup.env}
        prefill = [*common, "--disaggregation-mode", "prefill", *setup.prefill_args]
        decode = [
            *common, "--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "cpu_tensor",
            *setup.decode_args,
        ]  # fmt: skip
        number = len(list(folder.glob("*.log"))) or ""
        self.prefill = Server(zygote, f"prefill{number}", prefill, {**env, **setup.prefill_env}, folder)
        self.decode = Server(zygote, f"decode{number}", decode, {**env, **setup.decode_env}, folder)

    @property
    def servers(self) -> tuple[Server, Server]:
        """Both."""
        return self.prefill, self.decode

    def wait_healthy(self) -> None:
        """Until both answer."""
        for server in self.servers:
            server.wait_healthy()

    def kill(self) -> None:
        """End both."""
        for server in self.servers:
            server.kill()

    def with_decode_of(self, other: Pair) -> Pair:
        """This one's prefill server, and the other one's decode server."""
        mixed = copy.copy(self)
        mixed.decode = other.decode
        return mixed

    def ranks(self, side: str) -> int:
        """Ranks of one side that a request involves."""
        args = [*self.setup.args, *(self.setup.prefill_args if side == "prefill" else self.setup.decode_args)]
        return math.prod(int(args[args.index(flag) + 1]) for flag in ("--tp-size", "--pp-size") if flag in args)

    def rendezvous(self, room: int) -> dict[str, Any]:
        """What a router adds to a request."""
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port, "bootstrap_room": room}


def environment() -> dict[str, str]:
    """What a process needs in which SGLang can be imported on a CPU."""
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return {**os.environ, **cpu}


def free_port() -> int:
    """A port that nobody listens at."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port in {_PORTS}")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
