"""`kvferry bench`: options of the measurements, and what is shown of them."""

from __future__ import annotations

import os
import sys
from itertools import zip_longest
from typing import Annotated, Any

import cyclopts
import msgspec
from cyclopts import Parameter
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvferry import config as settings
from kvferry.bench import plan as plan_bench
from kvferry.bench import rooms as rooms_bench
from kvferry.bench import transfer as transfer_bench
from kvferry.bench.plan import PlanReport, PlanSpec
from kvferry.bench.rooms import RoomsReport
from kvferry.bench.rooms_spec import HABITS, RoomsSpec
from kvferry.bench.stats import Times, gb_per_s
from kvferry.bench.transfer import Mode, TransferReport
from kvferry.bench.transfer_spec import TransferSpec
from kvferry.cli.words import count
from kvferry.errors import InputError

app = cyclopts.App(
    name="bench", help="Measure kvferry on this machine: between real processes, with every byte checked."
)

Engine = Annotated[str, Parameter(env_var="KVFERRY_ENGINE")]
FIGURES = (
    "median, ms", "best decile, ms", "p99, ms", "GB/s", "of memcpy (best)", "of stream (best)",
    "CPU prefill, ms", "CPU decode, ms",
)  # fmt: skip
Flag = Annotated[bool, Parameter(negative=())]


@app.command
def transfer(
    *, engine: Engine = "local", mechanism: str | None = None, layers: int = 1, pages: int | None = None,
    page_bytes: int = 65536, order: str = "shuffle", inflight: int = 1, repeats: int | None = None,
    pool: str = "private", digest: str | None = None, compare_digest: Flag = False, layout: str = "page",
    wait: str = "yield", seed: int = 1, quick: Flag = False, json: Flag = False,
) -> int:  # fmt: skip
    """Measure large hand-overs between two processes, from send() until the decode side's scheduler sees Success.

    A memcpy of the same bytes, and for TCP a plain loopback stream, are measured in turns with the transfers. Every
    byte of every round is compared outside of the measured time; exits with 1 if one differs.

    Args:
        engine: The transfer engine.
        mechanism: Option "mechanism" of the engine; the local engine knows auto, shm, cma and tcp.
        layers: Layers of the model.
        pages: Pages of the request; with --inflight, of all requests together. 2048, with --quick 128.
        page_bytes: Bytes of one page of one layer, K and V together.
        order: Where the pages lie: contig (one run on both sides), shuffle, or reverse (one run, filled backwards).
        inflight: Requests at once, each with its share of the pages.
        repeats: Measured rounds. 30, with --quick 3.
        pool: How the pools are allocated: private (huge pages if there are any) or memfd.
        digest: The setting "digest": off, sample or full; by default as it is set.
        compare_digest: Measure the digests off, sample and full in turns.
        layout: page (a page of all layers is one run) or layer (one tensor for K and one for V of each layer).
        wait: How the decode side waits: wait, yield (sched_yield between polls), nap (200 us) or busy (300 us Python).
        seed: Decides the shuffled order.
        quick: Few and small rounds: whether it works, not how fast it is.
        json: Print one JSON object as the last line; the table goes to standard error.
    """
    if compare_digest and digest is not None:
        raise InputError("--digest and --compare-digest were both given", hint="give one of them")
    digests = settings.DIGESTS if compare_digest else (_digest(digest),)
    spec = TransferSpec(
        engine=engine, mechanism=mechanism, layers=layers, pages=_given(pages, 128 if quick else 2048),
        page_bytes=page_bytes, order=order, inflight=inflight, repeats=_given(repeats, 3 if quick else 30),
        warmup=1 if quick else 2, pool=pool, digests=digests, layout=layout, wait=wait, seed=seed,
    )  # fmt: skip
    report = transfer_bench.measure(spec, _say)
    _show(report, transfer_table(report), json)
    return 0


@app.command
def rooms(
    *, engine: Engine = "local", mechanism: str | None = None, request_bytes: int = 65536,
    modes: str = ",".join(HABITS), samples: int | None = None, rooms: int | None = None, window: int = 64,
    idle_s: float | None = None, peers: str | None = None, digest: str | None = None, quick: Flag = False,
    json: Flag = False,
) -> int:  # fmt: skip
    """Measure small requests: latency for each habit of a scheduler, rooms per second, idle cost, cost per peer.

    Args:
        engine: The transfer engine.
        mechanism: Option "mechanism" of the engine; the local engine knows auto, shm, cma and tcp.
        request_bytes: Bytes of one request: one page.
        modes: The schedulers' habits, separated by commas: wait (in wait()), nap (200 us between polls), yield
            (sched_yield between polls), busy (300 us of Python between polls), busy_short_switch (the same with
            sys.setswitchinterval(0.0005)); "" leaves them out.
        samples: Measured requests per mode. 300, with --quick 20.
        rooms: Requests of the throughput measurement; 0 leaves it out. 2000, with --quick 200.
        window: Requests in flight in it.
        idle_s: Seconds for which idle nodes are watched; 0 leaves them out. 5, with --quick 0.5.
        peers: Ascending numbers of connected peers, separated by commas; "" leaves them out. 1,100,1000, with
            --quick 1,3.
        digest: The setting "digest": off, sample or full; by default as it is set.
        quick: Few samples: whether it works, not how fast it is.
        json: Print one JSON object as the last line; the table goes to standard error.
    """
    spec = RoomsSpec(
        engine=engine, mechanism=mechanism, request_bytes=request_bytes, modes=tuple(_words(modes)),
        samples=_given(samples, 20 if quick else 300), warmup=5 if quick else 30,
        rooms=_given(rooms, 200 if quick else 2000), window=window, idle_s=_given(idle_s, 0.5 if quick else 5.0),
        peers=_numbers("peers", _given(peers, "1,3" if quick else "1,100,1000")), digest=_digest(digest),
    )  # fmt: skip
    report = rooms_bench.measure(spec, _say)
    _show(report, rooms_table(report), json)
    return 0


@app.command
def plan(*, repeats: int = 15, seed: int = 1, quick: Flag = False, json: Flag = False) -> int:
    """Measure how fast layouts and page lists become rows, in this process, without an engine.

    Each case makes all rows of one request between two ranks, from its page lists on; "first contact" reads a peer's
    layout, checks it, and finds the route and who sends.

    Args:
        repeats: Measured plans per case.
        seed: Decides where the pages lie.
        quick: One plan per case: whether it works, not how fast it is.
        json: Print one JSON object as the last line; the table goes to standard error.
    """
    report = plan_bench.measure(PlanSpec(1 if quick else repeats, seed), _say)
    _show(report, plan_table(report), json)
    return 0


def plan_table(report: PlanReport) -> Group:
    """The figures of `bench plan`."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("case", no_wrap=True)
    for name in ("rows", "ms", "M rows/s", "peak MB"):
        table.add_column(name, justify="right")
    for case in report.cases:
        rates = f"{case.rows:,}", f"{case.rows_per_s / 1e6:.0f}"
        rows, speed = rates if case.rows else ("", "")
        table.add_row(case.case, rows, f"{1e3 * case.seconds:.2f}", speed, f"{case.peak_bytes / 1e6:.1f}")
    return Group(table, Text(f"machine: {_machine(report.machine)}"))


def transfer_table(report: TransferReport) -> Group:
    """The figures of `bench transfer`, a column for each thing that was measured; what they depend on below it."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    others = [(name, times) for name, times in (("memcpy", report.memcpy), ("stream", report.stream)) if times]
    for name in (*(f"digest {digest}" for digest in report.modes), *(name for name, _ in others)):
        table.add_column(name, justify="right")
    columns = [_times(report, mode.times) + _costs(mode) for mode in report.modes.values()]
    columns += [_times(report, times) for _, times in others]
    for row in zip_longest(FIGURES, *columns, fillvalue=""):
        if any(row[1:]):
            table.add_row(*row)
    return Group(table, Text(_footnotes(report)))


def rooms_table(report: RoomsReport) -> Table:
    """The figures of `bench rooms`."""
    table = Table.grid(padding=(0, 2))
    for mode, latency in report.latency.items():
        figures = f"p50 {latency.p50_ms:.3f} ms, p99 {latency.p99_ms:.3f} ms, {latency.samples} samples"
        table.add_row(Text(mode, "bold"), figures)
    if report.rooms_per_s is not None:
        table.add_row(Text("throughput", "bold"), f"{report.rooms_per_s:.0f} rooms/s, {report.spec.window} in flight")
    for side, idle in report.idle.items():
        figures = f"{idle.cpu_percent:.2f} % of a processor, RSS {idle.rss_mb:.1f} MB, PSS {idle.pss_mb:.1f} MB"
        table.add_row(Text(f"idle {side}", "bold"), figures)
    for side, cost in report.peers.items():
        sizes = ", ".join(f"{number}: {rss_mb:.1f} MB" for number, rss_mb in cost.rss_mb.items())
        growth = f"; {cost.kb_per_peer:.1f} KB a peer" if cost.kb_per_peer is not None else ""
        table.add_row(Text(f"{side} with peers", "bold"), f"{sizes}{growth}")
    table.add_row(Text("engine", "bold"), _mechanism(report.engine_info))
    table.add_row(Text("machine", "bold"), _machine(report.machine))
    return table


def _show(report: TransferReport | RoomsReport | PlanReport, table: Table | Group, json: bool) -> None:
    Console(stderr=json).print(table, highlight=False)
    if json:
        print(msgspec.json.encode(report).decode())


def _times(report: TransferReport, times: Times) -> list[str]:
    seconds = (times.median_s, times.best_decile_s, times.p99_s)
    return [*(f"{1e3 * value:.2f}" for value in seconds), f"{gb_per_s(report.nbytes, times.median_s):.2f}"]


def _costs(mode: Mode) -> list[str]:
    ratios = ((mode.memcpy_ratio, mode.memcpy_ratio_best), (mode.stream_ratio, mode.stream_ratio_best))
    shown = ["" if ratio is None else f"{ratio:.2f} ({best:.2f})" for ratio, best in ratios]
    return [*shown, f"{mode.prefill_cpu_ms:.2f}", f"{mode.decode_cpu_ms:.2f}"]


def _footnotes(report: TransferReport) -> str:
    spec = report.spec
    added = ", ".join(f"{digest} {percent:+.1f} %" for digest, percent in report.digest_added_percent.items())
    pools = ", ".join(f"{side} {size >> 10} KiB" for side, size in report.pool_page_bytes.items())
    pages = f"{count(spec.layers, 'layer')}, {count(spec.pages, 'page')} of {spec.page_bytes} bytes"
    return "\n".join([
        f"{report.nbytes:,} bytes: {pages}",
        f"order {spec.order}, layout {spec.layout}, {spec.inflight} in flight, {count(spec.repeats, 'round')}, "
        f"decode waits by {spec.wait}",
        *([f"added by the digest: {added}"] if added else []),
        f"every byte equal in {count(report.rounds_checked, 'round')}; pool pages: {pools}",
        f"{_mechanism(report.engine_info)}; {_machine(report.machine)}",
    ])  # fmt: skip


def _mechanism(engine_info: dict[str, Any]) -> str:
    peers = engine_info.get("peers", {})
    return ", ".join(sorted(set(peers.values()))) if peers else str(engine_info)


def _machine(machine: dict[str, Any]) -> str:
    load = " ".join(f"{value:.2f}" for value in machine["load_average"])
    versions = machine["versions"]
    return f"load {load}, {machine['processors']} processors, Python {versions['python']}, kernel {versions['kernel']}"


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _digest(given: str | None) -> str:
    return given if given is not None else settings.load(os.environ).digest


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise InputError(f"--{name} {text!r} is no list of numbers", hint="e.g. 1,100,1000") from None


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
