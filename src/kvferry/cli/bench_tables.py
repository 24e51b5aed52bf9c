"""What `kvferry bench` shows of what it has measured: tables, and what the figures depend on below them."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvferry.bench.model_case import scaled_in_words
from kvferry.bench.plan import PlanReport
from kvferry.bench.rooms import RoomsReport
from kvferry.bench.stats import Times, gb_per_s
from kvferry.bench.transfer_report import Mode, TransferReport
from kvferry.bench.transfer_spec import TransferSpec
from kvferry.cli.words import count

FIGURES = (
    "median, ms", "best decile, ms", "p99, ms", "GB/s", "of memcpy (best)", "of stream (best)",
    "of bare (best)",    "CPU prefill, ms", "CPU decode, ms",
)  # fmt: skip


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
    beside = (("memcpy", report.memcpy), ("stream", report.stream), *_bare_columns(report))
    others = [(name, times) for name, times in beside if times]
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


def _times(report: TransferReport, times: Times) -> list[str]:
    seconds = (times.median_s, times.best_decile_s, times.p99_s)
    return [*(f"{1e3 * value:.2f}" for value in seconds), f"{gb_per_s(report.nbytes, times.median_s):.2f}"]


def _costs(mode: Mode) -> list[str]:
    ratios = (
        (mode.memcpy_ratio, mode.memcpy_ratio_best), (mode.stream_ratio, mode.stream_ratio_best),
        (mode.bare_ratio, mode.bare_ratio_best),
    )  # fmt: skip
    shown = ["" if ratio is None else f"{ratio:.2f} ({best:.2f})" for ratio, best in ratios]
    return [*shown, f"{mode.prefill_cpu_ms:.2f}", f"{mode.decode_cpu_ms:.2f}"]


def _footnotes(report: TransferReport) -> str:
    spec = report.spec
    added = ", ".join(f"{digest} {percent:+.1f} %" for digest, percent in report.digest_added_percent.items())
    pools = ", ".join(f"{side} {size >> 10} KiB" for side, size in report.pool_page_bytes.items())
    return "\n".join([
        f"{report.nbytes:,} bytes: {_geometry(spec)}",
        *([scaled_in_words(spec.case)] if spec.case and spec.case.is_scaled else []),
        f"order {spec.order}, {spec.inflight} in flight, {count(spec.repeats, 'round')}, decode waits by {spec.wait}",
        *_bare_note(report),
        *([f"added by the digest: {added}"] if added else []),
        f"every byte equal in {count(report.rounds_checked, 'round')}; pool pages: {pools}",
        f"{_mechanism(report.engine_info)}; {_machine(report.machine)}",
    ])  # fmt: skip


def _geometry(spec: TransferSpec) -> str:
    if spec.case is None:
        pages = f"{count(spec.layers, 'layer')}, {count(spec.pages, 'page')} of {spec.page_bytes} bytes"
        return f"{pages}, layout {spec.layout}"
    case = spec.case
    sides = ", ".join(
        f"{side} {words or 'one rank'} ({count(case.ranks[side], 'rank')} in one process)"
        for side, words in (("prefill", case.prefill), ("decode", case.decode))
    )
    return f"{case.model}, {count(case.tokens, 'token')}, {count(case.layers, 'layer')}; {sides}"


def _bare_columns(report: TransferReport) -> tuple[tuple[str, Times | None], ...]:
    bare = report.bare
    return (("bare", bare.times), ("bare, one batch", bare.one_batch)) if bare else ()


def _bare_note(report: TransferReport) -> list[str]:
    bare = report.bare
    if bare is None:
        return []
    rows = f"{bare.rows:,} rows in batches of kvferry's size, {bare.batches} of them"
    cost = f"{bare.prefill_cpu_ms:.2f} ms of CPU at the prefill side; batches cost {bare.batching_percent:+.1f} %"
    return [f"bare: {rows}, {cost} against one"]


def _mechanism(engine_info: dict[str, Any]) -> str:
    peers = engine_info.get("peers", {})
    return ", ".join(sorted(set(peers.values()))) if peers else str(engine_info)


def _machine(machine: dict[str, Any]) -> str:
    load = " ".join(f"{value:.2f}" for value in machine["load_average"])
    versions = machine["versions"]
    return f"load {load}, {machine['processors']} processors, Python {versions['python']}, kernel {versions['kernel']}"
