"""`kvferry bench transfer`: the whole path from `send` to Success, between two processes, every byte compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvferry.bench.children import Child, Crew
from kvferry.bench.failure import BenchError
from kvferry.bench.machine import surroundings
from kvferry.bench.stats import Times, added_percent, gb_per_s, times_of
from kvferry.bench.transfer_side import Setup
from kvferry.bench.transfer_spec import TransferSpec, check, settings_of

SIDE = "kvferry.bench.transfer_side"


class Mode(msgspec.Struct, frozen=True):
    """What was measured with one value of the setting `digest`.

    Attributes:
        times: from just before send() until poll() says Success at the decode side.
        gb_per_s: by the median.
        prefill_cpu_ms, decode_cpu_ms: CPU of all threads per round, median; the decode side's polling included.
        memcpy_ratio: time of a memcpy of the same bytes by the time of the transfer, ratio of medians; 1 is as fast.
        memcpy_ratio_best: the same of the best deciles.
        stream_ratio, stream_ratio_best: the same against a plain loopback stream; None where it was not measured.
    """

    times: Times
    gb_per_s: float
    prefill_cpu_ms: float
    decode_cpu_ms: float
    memcpy_ratio: float
    memcpy_ratio_best: float
    stream_ratio: float | None
    stream_ratio_best: float | None


class TransferReport(msgspec.Struct, frozen=True):
    """Everything that was measured.

    Attributes:
        spec: what was asked for.
        nbytes: bytes of one round.
        modes: by value of the setting `digest`.
        memcpy: one thread, contiguous, between pools of the same kind; in turns with the transfers.
        stream: a plain TCP stream of the same bytes over loopback; None unless bytes went by TCP.
        digest_added_percent: what each digest costs end to end against "off", median of paired ratios.
        bytes_equal: whether every byte was right; a report with a wrong one is never made.
        rounds_checked: rounds whose bytes were compared, warm-up included.
        pool_page_bytes: page size of the pools of both sides.
        engine_info: what the prefill side's engine says: the mechanism really used, and why.
        machine: load average at the start, processors, versions, settings that are not the defaults.
    """

    spec: TransferSpec
    nbytes: int
    modes: dict[str, Mode]
    memcpy: Times
    stream: Times | None
    digest_added_percent: dict[str, float]
    bytes_equal: bool
    rounds_checked: int
    pool_page_bytes: dict[str, int]
    engine_info: dict[str, Any]
    machine: dict[str, Any]


class Sample(msgspec.Struct, frozen=True):
    """One transfer: seconds, and CPU seconds of both sides."""

    seconds: float
    prefill_cpu_s: float
    decode_cpu_s: float


def measure(spec: TransferSpec, say: Callable[[str], None], command: Sequence[str] = ()) -> TransferReport:
    """Measure.

    Args:
        spec: what.
        say: takes a line on how far it is.
        command: what starts a worker process; () is this package's own.

    Raises:
        ConfigError: the spec is wrong, or an engine or setting refuses it.
        BenchError: a process died, hung or failed, or bytes differ.
    """
    check(spec)
    machine = surroundings(settings_of(spec.mechanism, spec.digests[0]))
    with Crew(command) as crew:
        run = _Run(crew, spec)
        run.start()
        say(f"warming up, {spec.nbytes:,} bytes a round")
        for _ in range(max(1, spec.warmup)):
            for digest in spec.digests:
                run.transfer(digest)
            run.memcpy()
        run.connect_stream()
        for number in range(spec.repeats):
            run.turn(number)
            if (number + 1) % max(1, spec.repeats // 5) == 0:
                say(f"round {number + 1} of {spec.repeats}")
        return run.report(machine)


class _Run:
    """The two processes and what they have measured so far."""

    def __init__(self, crew: Crew, spec: TransferSpec) -> None:
        self._crew = crew
        self._spec = spec
        self._limit_s = spec.round_limit_s + 30
        self._rounds = 0
        self._streams = False
        self._samples: dict[str, list[Sample]] = {digest: [] for digest in spec.digests}
        self._memcpy: list[float] = []
        self._stream: list[float] = []
        self._pages: dict[str, int] = {}

    def start(self) -> None:
        """Start both sides."""
        setup = Setup(self._spec)
        self._prefill = self._crew.start("prefill", f"{SIDE}:PrefillSide", setup)
        self._decode = self._crew.start("decode", f"{SIDE}:DecodeSide", setup)
        hello = self._crew.ready(self._prefill)
        self._endpoints: dict[str, str] = hello["endpoints"]
        self._pages = {"prefill": hello["pool_page_bytes"]}
        self._pages["decode"] = self._crew.ready(self._decode)["pool_page_bytes"]

    def turn(self, number: int) -> None:
        """One round of everything that is compared, in another order each time."""
        steps: list[Callable[[], None]] = [partial(self._sample, digest) for digest in self._samples]
        steps.append(lambda: self._memcpy.append(self.memcpy()))
        if self._streams:
            steps.append(lambda: self._stream.append(self.stream()))
        for step in np.random.default_rng((self._spec.seed, number)).permutation(len(steps)).tolist():
            steps[step]()

    def transfer(self, digest: str) -> Sample:
        """One round of rooms, and the comparison of its bytes. Raises BenchError if any differs."""
        self._rounds += 1
        endpoint = self._endpoints[digest]
        self._ask(self._prefill, "prepare", round_number=self._rounds, digest=digest)
        self._ask(self._decode, "prepare", round_number=self._rounds, digest=digest, endpoint=endpoint)
        self._ask(self._prefill, "claimed")
        received, sent = self._both("receive", "send")
        wrong = self._ask(self._decode, "check", round_number=self._rounds)
        if wrong:
            raise BenchError(f"wrong bytes at the decode side: {wrong}")
        return Sample(received["end_s"] - sent["begin_s"], sent["cpu_s"], received["cpu_s"])

    def memcpy(self) -> float:
        """Seconds of one memcpy."""
        return float(self._ask(self._prefill, "memcpy"))

    def connect_stream(self) -> None:
        """Prepare the plain stream, if the engine sends by TCP."""
        used = self._ask(self._prefill, "info").get("peers", {})
        self._streams = self._spec.mechanism == "tcp" or any(text.startswith("tcp") for text in used.values())
        if self._streams:
            port = self._ask(self._decode, "stream_listen")
            self._ask(self._prefill, "stream_connect", port=port)
            self.stream()

    def stream(self) -> float:
        """Seconds of one plain stream."""
        end_s, begin_s = self._both("stream_receive", "stream_send")
        return float(end_s - begin_s)

    def report(self, machine: dict[str, Any]) -> TransferReport:
        """What came out."""
        memcpy = times_of(self._memcpy)
        stream = times_of(self._stream) if self._stream else None
        return TransferReport(
            spec=self._spec, nbytes=self._spec.nbytes,
            modes={digest: mode_of(self._spec, samples, memcpy, stream) for digest, samples in self._samples.items()},
            memcpy=memcpy, stream=stream, digest_added_percent=added_by_digests(self._samples), bytes_equal=True,
            rounds_checked=self._rounds, pool_page_bytes=self._pages,
            engine_info=self._ask(self._prefill, "info"), machine=machine,
        )  # fmt: skip

    def _sample(self, digest: str) -> None:
        self._samples[digest].append(self.transfer(digest))

    def _both(self, receive: str, send: str) -> tuple[Any, Any]:
        """Have the decode side wait, then the prefill side send; returns what both say of it."""
        self._crew.begin(self._decode, receive)
        self._crew.answer(self._decode, receive, self._limit_s)  # it waits from now on
        sent = self._ask(self._prefill, send)
        return self._crew.answer(self._decode, receive, self._limit_s), sent

    def _ask(self, child: Child, what: str, **arguments: Any) -> Any:
        return self._crew.ask(child, what, self._limit_s, **arguments)


def added_by_digests(samples: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    """Percent that each value of the setting `digest` costs against "off"; empty if that was not measured."""
    base = [sample.seconds for sample in samples.get("off", ())]
    others = {digest: series for digest, series in samples.items() if base and digest != "off"}
    return {digest: added_percent(base, [sample.seconds for sample in series]) for digest, series in others.items()}


def mode_of(spec: TransferSpec, samples: Sequence[Sample], memcpy: Times, stream: Times | None) -> Mode:
    """Sum up the rounds of one mode."""
    times = times_of([sample.seconds for sample in samples])
    return Mode(
        times=times, gb_per_s=gb_per_s(spec.nbytes, times.median_s),
        prefill_cpu_ms=1e3 * statistics.median(sample.prefill_cpu_s for sample in samples),
        decode_cpu_ms=1e3 * statistics.median(sample.decode_cpu_s for sample in samples),
        memcpy_ratio=memcpy.median_s / times.median_s,
        memcpy_ratio_best=memcpy.best_decile_s / times.best_decile_s,
        stream_ratio=stream.median_s / times.median_s if stream else None,
        stream_ratio_best=stream.best_decile_s / times.best_decile_s if stream else None,
    )  # fmt: skip
