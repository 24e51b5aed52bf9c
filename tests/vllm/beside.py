"""kvferry beside vLLM's own NixlConnector, in the same servers, in turns: `make vllm-beside`.

Each connector has a prefill and a decode server of its own, and the proxy of the examples, all with SmolLM2; a round
sends one prompt of new random tokens through each pair in turn, while the other pair is stopped by a signal. Time to
first token is that of a streamed answer through the proxy. Transfer time is what each connector says of itself to
Prometheus: ours from the call that begins a load until its digest was compared, NIXL's from the posting of the read
until it is done; both leave the way there out. The text that both pairs answer must be the same.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving import Server, free_port, kvferry, proxy_between, serve

from kvferry.serve.transformers_folder import write_folder
from kvferry.serve.weights import find_model

WARM_UP = 3
AWAKE_S = 0.3
"""Time for timers that ran out meanwhile."""
NEW_TOKENS = 8
METRICS_S = 10.0


class Contestant:
    """One connector, its servers, and what was measured."""

    def __init__(
        self, name: str, model: Path, folder: Path, connectors: tuple[Mapping[str, Any], Mapping[str, Any]],
        metrics: tuple[str, str],
    ) -> None:  # fmt: skip
        self.name, self._metrics = name, metrics
        sides = zip(("prefill", "decode"), connectors, strict=True)
        self.prefill, self.decode = (
            serve(model, connector, f"{name}-{side}", folder, _environment()) for side, connector in sides
        )
        self.proxy = proxy_between(self.prefill, self.decode, folder / f"{name}-proxy.log")
        self.first_token_s: list[float] = []
        self.transfer_s: list[float] = []
        self.load_bytes = 0.0

    @property
    def servers(self) -> tuple[Server, Server, Server]:
        """All three."""
        return self.prefill, self.decode, self.proxy

    def signal(self, number: signal.Signals) -> None:
        """Stop the servers, or have them go on."""
        for server in self.servers:
            os.killpg(server.process.pid, number)

    def ask(self, prompt: list[int]) -> str:
        """One request through the proxy, while the other pair stands still; its text."""
        self.signal(signal.SIGCONT)
        time.sleep(AWAKE_S)
        before = self._totals()
        begun_s = time.monotonic()
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        events = self.proxy.events("/v1/completions", **body)
        said = [next(events)]
        self.first_token_s.append(time.monotonic() - begun_s)
        said += events
        self._note_load(before)
        self.signal(signal.SIGSTOP)
        return "".join(event["choices"][0]["text"] for event in said)

    def forget(self) -> None:
        """The warm-up is over."""
        self.first_token_s.clear()
        self.transfer_s.clear()

    def report(self) -> str:
        """Medians and best deciles."""
        first, transfer = ([1e3 * value for value in sorted(each)] for each in (self.first_token_s, self.transfer_s))
        tenth = len(first) // 10
        return (
            f"{self.name:8} first token {statistics.median(first):8.1f} ms (best decile {first[tenth]:8.1f}), "
            f"transfer {statistics.median(transfer):7.2f} ms (best decile {transfer[tenth]:7.2f}), "
            f"{self.load_bytes / 2**20:.2f} MiB, {len(first)} requests"
        )

    def _totals(self) -> list[float]:
        """Loads so far, their seconds and their bytes, as decode says."""
        seconds, nbytes = self._metrics
        return [self.decode.metric(name) for name in (f"{seconds}_count", f"{seconds}_sum", f"{nbytes}_sum")]

    def _note_load(self, before: list[float]) -> None:
        """What the one load of a request took; vLLM publishes it with a later step of its engine."""
        until = time.monotonic() + METRICS_S
        while (now := self._totals())[0] == before[0]:
            assert time.monotonic() < until, f"{self.name}: the request loaded nothing"
            time.sleep(0.05)
        assert now[0] == before[0] + 1
        self.transfer_s.append(now[1] - before[1])
        self.load_bytes = now[2] - before[2]


def _environment() -> dict[str, str]:
    """Of any server: NIXL's look for each other at a port of their own."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }  # fmt: skip


def nixl(role: str) -> dict[str, Any]:
    """The configuration of vLLM's connector."""
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "fail"}


def main(rounds: int, tokens: int) -> None:
    """Run all rounds and print a line for each connector."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(find_model(None), folder / "model")
        ours = kvferry("kv_producer", "fail"), kvferry("kv_consumer", "fail")
        theirs = nixl("kv_producer"), nixl("kv_consumer")
        sides: list[Contestant] = []
        try:
            for label, connectors, metrics in (
                ("kvferry", ours, ("kvferry:load_seconds", "kvferry:load_bytes")),
                ("nixl", theirs, ("vllm:nixl_xfer_time_seconds", "vllm:nixl_bytes_transferred")),
            ):
                sides.append(Contestant(label, folder / "model", folder, connectors, metrics))
                for server in (sides[-1].prefill, sides[-1].decode):
                    server.wait_ready("/health")
                sides[-1].signal(signal.SIGSTOP)
            for number in range(WARM_UP + rounds):
                drawn = random.Random(number)
                prompt = [drawn.randrange(1000, 40000) for _ in range(tokens)]
                texts = {side.ask(prompt) for side in sides}
                assert len(texts) == 1, texts
                if number == WARM_UP - 1:
                    for side in sides:
                        side.forget()
            for side in sides:
                print(side.report())
        finally:
            for side in sides:
                side.signal(signal.SIGCONT)
                for server in side.servers:
                    server.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
