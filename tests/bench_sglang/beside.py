"""kvferry beside SGLang's own connectors on host memory, on the same engines, in turns: `make bench-sglang`.

Two processes for each contestant, none of them a server: bootstrap server, managers, senders and receivers as a
scheduler uses them. All have the same memory (huge pages, a region per layer), page lists and habit; a round writes new
bytes, has decode name its pages, then takes the time from just before send() until decode's poll() says Success; every
byte is compared afterwards. Small requests come in bursts, as on a busy server; a burst's first one is counted apart.
SGLang's connectors have threads that spin, so they are stopped by a signal while another contestant is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import time
from pathlib import Path

from side import Setup
from work import Work

from kvferry.bench.children import Crew

COMMAND = (sys.executable, str(Path(__file__).with_name("worker.py")))
AWAKE_S = 0.2
"""Time for timers that ran out meanwhile."""
LIMIT_S = 120.0
IDLE_S = 2.0
LARGE = Work("134 MB", layers=32, pages=64, page_bytes=65536, nap_us=200, forward_s=0.02, burst=1)
TINY = Work("64 KB", layers=4, pages=4, page_bytes=4096, nap_us=0, forward_s=0.0, burst=12)
FIRST = "64 KB 1st"
"""A turn's first small request."""
KINDS = {"large": LARGE, "small": TINY}
CASES = ((LARGE, "contiguous"), (LARGE, "shuffled"), (TINY, "shuffled"))
CONTESTANTS = (
    ("sglang", "nixl", ("",)), ("kvferry", "nixl", ("sample", "off")), ("sglang", "mooncake", ("",)),
    ("kvferry", "mooncake", ("sample", "off")), ("kvferry", "local", ("sample", "off")),
)  # fmt: skip

Sample = tuple[float, float, float]
"""Milliseconds, milliseconds of CPU at prefill and at decode."""


class Contestant:
    """A connector on an engine: both its processes."""

    def __init__(self, crew: Crew, connector: str, engine: str, work: Work) -> None:
        self.connector, self.engine = connector, engine
        self._crew = crew
        self._burst = work.burst
        setup = Setup(work, engine, free_port())
        module, kind = f"{connector}_side", connector.capitalize()
        self._sides = []
        for side in ("prefill", "decode"):
            child = crew.start(f"{connector} {engine} {side}", f"{module}:{kind}{side.capitalize()}", setup)
            hello = crew.ready(child)
            self._sides.append(child)
            if side == "prefill":
                self._endpoints = hello["endpoints"]
        self.stop()

    def turn(self, number: int, order: str, mode: str) -> list[Sample]:
        """A burst of transfers while all others rest. Raises BenchError, SystemExit."""
        self.go()
        found = [self._round(number + each, order, mode) for each in range(self._burst)]
        self.stop()
        return found

    def _round(self, number: int, order: str, mode: str) -> Sample:
        crew, (prefill, decode) = self._crew, self._sides
        endpoint = self._endpoints[mode]
        crew.begin(prefill, "offer", round_number=number, mode=mode)
        crew.ask(decode, "claim", LIMIT_S, round_number=number, order=order, mode=mode, endpoint=endpoint)
        crew.answer(prefill, "offer", LIMIT_S)
        crew.ask(decode, "receive", LIMIT_S)  # it polls from now on
        sent = crew.ask(prefill, "send", LIMIT_S, round_number=number, order=order)
        received = crew.answer(decode, "receive", LIMIT_S)
        if wrong := crew.ask(decode, "check", LIMIT_S, round_number=number, order=order):
            raise SystemExit(f"{self.connector} on {self.engine}: {wrong}")
        return 1e3 * (received["end_s"] - sent["begin_s"]), 1e3 * sent["cpu_s"], 1e3 * received["cpu_s"]

    def idle(self) -> tuple[float, float]:
        """CPU of both sides while they are connected and idle, in percent of a processor; it goes on afterwards."""
        self.go()
        for child in self._sides:
            self._crew.begin(child, "idle", seconds=IDLE_S)
        prefill, decode = (self._crew.answer(child, "idle", LIMIT_S) for child in self._sides)
        return prefill, decode

    def go(self) -> None:
        """Let its processes run."""
        if self.connector == "sglang":
            self._signal(signal.SIGCONT)
            time.sleep(AWAKE_S)

    def stop(self) -> None:
        """Have SGLang's processes stand still; kvferry's sleep by themselves."""
        if self.connector == "sglang":
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._sides:
            os.kill(child.process.pid, number)


def free_port() -> int:
    """A port of loopback that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(crew: Crew, work: Work, orders: list[str], repeats: int, engines: list[str]) -> list[dict]:
    """All contestants with one kind of request, in turns, in another order each round."""
    players = [
        (Contestant(crew, connector, engine, work), modes)
        for connector, engine, modes in CONTESTANTS
        if engine in engines
    ]
    turns = [(player, mode, order) for order in orders for player, modes in players for mode in modes]
    kinds = [work.name] if work.burst == 1 else [FIRST, *[work.name] * (work.burst - 1)]
    samples: dict[str, list[list[Sample]]] = {kind: [[] for _ in turns] for kind in kinds}
    number = 1
    for repeat in range(-1, repeats):  # the first one warms up
        for step in range(len(turns)):
            index = (step + 3 * repeat) % len(turns)
            player, mode, order = turns[index]
            found = player.turn(number, order, mode)
            number += work.burst
            if repeat >= 0:
                for kind, sample in zip(kinds, found, strict=True):
                    samples[kind][index].append(sample)
        print(f"{work.name}: round {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
    idle = {}
    for player, _ in players:
        idle[player] = dict(zip(("prefill_idle_percent", "decode_idle_percent"), player.idle(), strict=True))
        player.stop()
    for player, _ in players:
        player.go()
    return [
        {"work": kind, "order": order, "connector": player.connector, "engine": player.engine, "mode": mode,
         "nbytes": work.nbytes, **figures(of_kind[index]), **idle[player]}
        for kind, of_kind in samples.items()
        for index, (player, mode, order) in enumerate(turns)
    ]  # fmt: skip


def figures(samples: list[Sample]) -> dict:
    """Median and best decile of the milliseconds, medians of the CPU."""
    times, prefill, decode = ([each[column] for each in samples] for column in range(3))
    return {
        "median_ms": statistics.median(times), "best_decile_ms": sorted(times)[len(times) // 10],
        "prefill_cpu_ms": statistics.median(prefill), "decode_cpu_ms": statistics.median(decode), "repeats": len(times),
    }  # fmt: skip


def lines(found: list[dict]) -> list[str]:
    """One line for each contestant, with how it stands to SGLang on the same engine."""
    theirs = {(each["work"], each["order"], each["engine"]): each for each in found if each["connector"] == "sglang"}
    said = []
    for each in found:
        other = theirs.get((each["work"], each["order"], each["engine"]))
        name = f"{each['connector']} {each['engine']}" + (f", digest {each['mode']}" if each["mode"] else "")
        text = (
            f"{each['work']:10}{each['order']:11} {name:31} median {each['median_ms']:8.2f} ms, best decile "
            f"{each['best_decile_ms']:8.2f} ms, CPU prefill {each['prefill_cpu_ms']:7.1f} ms, decode "
            f"{each['decode_cpu_ms']:6.1f} ms"
        )
        if other is not None and other is not each:
            ratios = (other[key] / each[key] for key in ("median_ms", "best_decile_ms", "prefill_cpu_ms"))
            text += "; {:.2f} ({:.2f}) times as fast, 1/{:.1f} of the CPU at prefill".format(*ratios)
        said.append(text)
    players = {(each["connector"], each["engine"], each["work"]): each for each in found}.values()
    return said + [
        f"{each['work']:10}{'idle':11} {each['connector'] + ' ' + each['engine']:31} prefill "
        f"{each['prefill_idle_percent']:.1f} %, decode {each['decode_idle_percent']:.1f} % of a processor"
        for each in players
        if each["work"] != FIRST
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="measured rounds of each contestant and order")
    parser.add_argument("--engines", default="nixl,mooncake,local", help="which of them, with commas")
    parser.add_argument("--requests", default="large,small", help="which of them, with commas")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    found = []
    for work in (KINDS[name] for name in options.requests.split(",")):
        orders = [order for each, order in CASES if each is work]
        with Crew(COMMAND) as crew:
            found += measure(crew, work, orders, options.repeats, options.engines.split(","))
    print(*lines(found), f"load at the start {load}", sep="\n")
    if options.json:
        print(json.dumps({"load_average": load, "contestants": found}))


if __name__ == "__main__":
    main()
