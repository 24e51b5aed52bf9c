"""What `kvferry bench transfer` has to say of its rounds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry.bench.stats import Times, added_percent, gb_per_s, times_of
from kvferry.bench.transfer_spec import TransferSpec


class Mode(msgspec.Struct, frozen=True):
    """What was measured with one value of the setting `digest`.

    Attributes:
        times: from just before send() until poll() says Success at the decode side.
        gb_per_s: by the median.
        prefill_cpu_ms, decode_cpu_ms: CPU of all threads per round, median; the decode side's polling included.
        memcpy_ratio: time of a memcpy of the same bytes by the time of the transfer, ratio of medians; 1 is as fast.
        memcpy_ratio_best: the same of the best deciles.
        stream_ratio, stream_ratio_best: the same against a plain loopback stream; None where it was not measured.
        bare_ratio, bare_ratio_best: the same against the engine's library driven bare; None where it was not measured.
    """

    times: Times
    gb_per_s: float
    prefill_cpu_ms: float
    decode_cpu_ms: float
    memcpy_ratio: float
    memcpy_ratio_best: float
    stream_ratio: float | None
    stream_ratio_best: float | None
    bare_ratio: float | None
    bare_ratio_best: float | None


class BareResult(msgspec.Struct, frozen=True):
    """The engine's own library with the same rows, without kvferry.

    Attributes:
        times: in kvferry's batches, one after the other, until the last one is done at the writer.
        one_batch: all rows at once, or as many as the library takes.
        rows: of a round.
        batches: of a round.
        prefill_cpu_ms: CPU of all threads of the writer per round, in batches, median.
        batching_percent: what batches cost against one, median of paired ratios.
    """

    times: Times
    one_batch: Times
    rows: int
    batches: int
    prefill_cpu_ms: float
    batching_percent: float


class TransferReport(msgspec.Struct, frozen=True):
    """Everything that was measured.

    Attributes:
        spec: what was asked for, and of a model what of it fitted into the memory.
        nbytes: bytes of one round.
        modes: by value of the setting `digest`.
        memcpy: one thread, contiguous, between pools of the same kind; in turns with the transfers.
        stream: a plain TCP stream of the same bytes over loopback; None unless bytes went by TCP.
        bare: the engine's own library; None where none was driven.
        digest_added_percent: what each digest costs end to end against "off", median of paired ratios.
        bytes_equal: whether every byte was right; a report with a wrong one is never made.
        rounds_checked: rounds whose bytes were compared, warm-up and bare rounds included.
        pool_page_bytes: page size of the pools of both sides.
        engine_info: what the prefill side's engine says: the mechanism really used, and why.
        machine: load average at the start, processors, versions, settings that are not the defaults.
    """

    spec: TransferSpec
    nbytes: int
    modes: dict[str, Mode]
    memcpy: Times
    stream: Times | None
    bare: BareResult | None
    digest_added_percent: dict[str, float]
    bytes_equal: bool
    rounds_checked: int
    pool_page_bytes: dict[str, int]
    engine_info: dict[str, Any]
    machine: dict[str, Any]


class Sample(msgspec.Struct, frozen=True):
    """One transfer: seconds, and CPU seconds of both sides; bare, of the writer alone."""

    seconds: float
    prefill_cpu_s: float
    decode_cpu_s: float = 0.0


def added_by_digests(samples: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    """Percent that each value of the setting `digest` costs against "off"; empty if that was not measured."""
    base = [sample.seconds for sample in samples.get("off", ())]
    others = {digest: series for digest, series in samples.items() if base and digest != "off"}
    return {digest: added_percent(base, [sample.seconds for sample in series]) for digest, series in others.items()}


def mode_of(
    nbytes: int, samples: Sequence[Sample], memcpy: Times, stream: Times | None, bare: BareResult | None
) -> Mode:
    """Sum up the rounds of one mode."""
    times = times_of([sample.seconds for sample in samples])
    streams, bares = _ratios(stream, times), _ratios(bare.times if bare else None, times)
    return Mode(
        times=times, gb_per_s=gb_per_s(nbytes, times.median_s),
        prefill_cpu_ms=1e3 * statistics.median(sample.prefill_cpu_s for sample in samples),
        decode_cpu_ms=1e3 * statistics.median(sample.decode_cpu_s for sample in samples),
        memcpy_ratio=memcpy.median_s / times.median_s,
        memcpy_ratio_best=memcpy.best_decile_s / times.best_decile_s,
        stream_ratio=streams[0], stream_ratio_best=streams[1], bare_ratio=bares[0], bare_ratio_best=bares[1],
    )  # fmt: skip


def bare_of(samples: Sequence[Sample], one_batch: Sequence[Sample], rows: int, batches: int) -> BareResult:
    """Sum up the rounds of the bare library."""
    series, ones = ([sample.seconds for sample in each] for each in (samples, one_batch))
    cpu_ms = 1e3 * statistics.median(sample.prefill_cpu_s for sample in samples)
    return BareResult(times_of(series), times_of(ones), rows, batches, cpu_ms, added_percent(ones, series))


def _ratios(other: Times | None, times: Times) -> tuple[float | None, float | None]:
    """Another thing's time by the transfer's, by medians and by best deciles."""
    if other is None:
        return None, None
    return other.median_s / times.median_s, other.best_decile_s / times.best_decile_s
