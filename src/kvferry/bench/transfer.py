"""`kvferry bench transfer`: the whole path from `send` to Success, between two processes, every byte compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvferry.bench import bare
from kvferry.bench.children import Child, Crew
from kvferry.bench.failure import BenchError
from kvferry.bench.machine import surroundings
from kvferry.bench.stats import times_of
from kvferry.bench.transfer_report import Sample, TransferReport, added_by_digests, bare_of, mode_of
from kvferry.bench.transfer_side import Setup
from kvferry.bench.transfer_spec import TransferSpec, check, settings_of

SIDE = "kvferry.bench.transfer_side"


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
        run.start_bare()
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
        self._bare: dict[bool, list[Sample]] = {}
        self._planned: dict[str, int] = {}
        self._pages: dict[str, int] = {}

    def start(self) -> None:
        """Start both sides."""
        setup = Setup(self._spec)
        self._prefill = self._crew.start("prefill", f"{SIDE}:PrefillSide", setup)
        self._decode = self._crew.start("decode", f"{SIDE}:DecodeSide", setup)
        hello, other = self._crew.ready(self._prefill), self._crew.ready(self._decode)
        self._endpoints: dict[str, list[str]] = hello["endpoints"]
        self._pages = {"prefill": hello["pool_page_bytes"], "decode": other["pool_page_bytes"]}
        self._decode_blocks: list[list[int]] = other["blocks"]

    def turn(self, number: int) -> None:
        """One round of everything that is compared, in another order each time."""
        steps: list[Callable[[], None]] = [partial(self._sample, digest) for digest in self._samples]
        steps.append(lambda: self._memcpy.append(self.memcpy()))
        if self._streams:
            steps.append(lambda: self._stream.append(self.stream()))
        steps += [partial(self._sample_bare, one) for one in self._bare]
        for step in np.random.default_rng((self._spec.seed, number)).permutation(len(steps)).tolist():
            steps[step]()

    def transfer(self, digest: str) -> Sample:
        """One round of rooms, and the comparison of its bytes. Raises BenchError if any differs."""
        self._rounds += 1
        endpoints = self._endpoints[digest]
        self._ask(self._prefill, "prepare", round_number=self._rounds, digest=digest)
        self._ask(self._decode, "prepare", round_number=self._rounds, digest=digest, endpoints=endpoints)
        self._ask(self._prefill, "claimed")
        received, sent = self._both("receive", "send")
        self._check()
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

    def start_bare(self) -> None:
        """Start the engine's own library on both sides, and warm it up, if it is to be driven bare."""
        if not bare.is_measured(self._spec.engine, self._spec.bare):
            return
        self._ask(self._prefill, "bare_start")
        described = self._ask(self._decode, "bare_start")
        blocks = self._decode_blocks
        self._planned = self._ask(self._prefill, "bare_attach", described=described, decode_blocks=blocks)
        for one in (False, True):
            self.bare(one)
            self._bare[one] = []

    def bare(self, one: bool) -> Sample:
        """One round of the bare library, in kvferry's batches or in one; and the comparison of its bytes."""
        self._rounds += 1
        self._ask(self._prefill, "fill", round_number=self._rounds)
        self._crew.begin(self._decode, "bare_serve")
        self._crew.answer(self._decode, "bare_serve", self._limit_s)
        written = self._ask(self._prefill, "bare_write", one=one)
        self._crew.answer(self._decode, "bare_serve", self._limit_s)
        self._check()
        return Sample(written["seconds"], written["cpu_s"])

    def report(self, machine: dict[str, Any]) -> TransferReport:
        """What came out."""
        memcpy = times_of(self._memcpy)
        stream = times_of(self._stream) if self._stream else None
        beside = bare_of(self._bare[False], self._bare[True], **self._planned) if self._bare else None
        nbytes = self._spec.nbytes
        return TransferReport(
            spec=self._spec, nbytes=nbytes,
            modes={digest: mode_of(nbytes, each, memcpy, stream, beside) for digest, each in self._samples.items()},
            memcpy=memcpy, stream=stream, bare=beside, digest_added_percent=added_by_digests(self._samples),
            bytes_equal=True, rounds_checked=self._rounds, pool_page_bytes=self._pages,
            engine_info=self._ask(self._prefill, "info"), machine=machine,
        )  # fmt: skip

    def _sample(self, digest: str) -> None:
        self._samples[digest].append(self.transfer(digest))

    def _sample_bare(self, one: bool) -> None:
        self._bare[one].append(self.bare(one))

    def _check(self) -> None:
        """Raises BenchError if a byte of this round differs."""
        wrong = self._ask(self._decode, "check", round_number=self._rounds)
        if wrong:
            raise BenchError(f"wrong bytes at the decode side: {wrong}")

    def _both(self, receive: str, send: str) -> tuple[Any, Any]:
        """Have the decode side wait, then the prefill side send; returns what both say of it."""
        self._crew.begin(self._decode, receive)
        self._crew.answer(self._decode, receive, self._limit_s)  # it waits from now on
        sent = self._ask(self._prefill, send)
        return self._crew.answer(self._decode, receive, self._limit_s), sent

    def _ask(self, child: Child, what: str, **arguments: Any) -> Any:
        return self._crew.ask(child, what, self._limit_s, **arguments)
