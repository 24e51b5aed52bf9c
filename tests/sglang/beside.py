"""kvferry beside SGLang's own connectors, in the same servers, in turns: `make sglang-beside`.

Each backend has a prefill and a decode server of its own, all of them forked from one import; a round sends one request
of new random tokens to each pair in turn. Schedulers of SGLang spin while they are idle, so the other pairs are stopped
by a signal meanwhile: on few cores they would take the time of the one that is measured. Time to first token is that of
a request for one token, until decode's answer is complete; transfer time is what SGLang itself measures of the
backend's sender.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import models
from client import at_once, new_room, post
from servers import Pair, Setup, Zygote

HERE = Path(__file__).parent
WARM_UP = 3
AWAKE_S = 0.2
"""Time for timers that ran out meanwhile."""


class Contestant:
    """One backend and its servers."""

    def __init__(self, zygote: Zygote, backend: str, model_folder: Path, folder: Path) -> None:
        self.backend = backend
        self.metrics = folder / "transfers.jsonl"
        self.metrics.touch()
        orders = folder / "orders"
        orders.mkdir()
        setup = Setup(backend=backend, env={"FERRY_BESIDE": str(self.metrics)}, args=("--disable-radix-cache",))
        self.pair = Pair(zygote, setup, model_folder, folder, orders)
        self.first_token_s: list[float] = []

    def signal(self, number: signal.Signals) -> None:
        """Stop the servers, or have them go on."""
        for server in self.pair.servers:
            for pid in server.processes():
                os.kill(pid, number)

    def ask(self, tokens: list[int]) -> None:
        """One request for one token, while the other pairs stand still; raises AssertionError if it is not answered."""
        self.signal(signal.SIGCONT)
        time.sleep(AWAKE_S)
        self._ask(tokens)
        self.signal(signal.SIGSTOP)

    def _ask(self, tokens: list[int]) -> None:
        body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}}
        body |= self.pair.rendezvous(new_room())
        begun_s = time.monotonic()
        ports = (self.pair.prefill.port, self.pair.decode.port)
        prefill, decode = at_once([lambda port=port: post(port, "/generate", body) for port in ports])
        assert decode.tokens, (self.backend, prefill, decode)
        self.first_token_s.append(time.monotonic() - begun_s)

    def report(self) -> str:
        """Medians and best deciles."""
        transfers = [json.loads(line) for line in self.metrics.read_text().splitlines()][WARM_UP:]
        latencies = [each["latency_ms"] for each in transfers]
        first = [1e3 * value for value in self.first_token_s[WARM_UP:]]
        return (
            f"{self.backend:10} first token {statistics.median(first):7.1f} ms (best decile {_low(first):7.1f}), "
            f"transfer {statistics.median(latencies):7.2f} ms (best decile {_low(latencies):7.2f}), "
            f"{transfers[-1]['total_mb']:.2f} MiB, {len(latencies)} requests"
        )


def _low(values: list[float]) -> float:
    return sorted(values)[len(values) // 10]


def main(backends: list[str], rounds: int, tokens: int) -> None:
    """Run all rounds and print a line for each backend."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        models.make_model("llama", root / "model")
        zygote = Zygote(root / "zygote.log")
        sides: list[Contestant] = []
        try:
            for backend in backends:
                (root / backend).mkdir()
                sides.append(Contestant(zygote, backend, root / "model", root / backend))
            for side in sides:
                side.pair.wait_healthy()
            for side in sides:
                side.signal(signal.SIGSTOP)
            for number in range(WARM_UP + rounds):
                drawn = random.Random(number)
                prompt = [drawn.randrange(3, 1000) for _ in range(tokens)]
                for side in sides:
                    side.ask(prompt)
            for side in sides:
                print(side.report())
        finally:
            for side in sides:
                side.signal(signal.SIGCONT)
            zygote.close()


if __name__ == "__main__":
    main(sys.argv[3:] or ["kvferry", "mooncake", "nixl"], int(sys.argv[1]), int(sys.argv[2]))
