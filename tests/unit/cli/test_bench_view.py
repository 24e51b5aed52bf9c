"""What `kvferry bench` shows of its figures, and that every option says what it does."""

import io
import statistics

import msgspec
import pytest
from rich.console import Console

from kvferry.bench.model_case import ModelCase, scaled_in_words
from kvferry.bench.peers import PeerCost
from kvferry.bench.plan import CaseResult, PlanReport, PlanSpec
from kvferry.bench.rooms import Idle, Latency, RoomsReport
from kvferry.bench.rooms_spec import RoomsSpec
from kvferry.bench.stats import Times
from kvferry.bench.transfer_report import BareResult, Mode, Sample, TransferReport, added_by_digests, bare_of, mode_of
from kvferry.bench.transfer_spec import TransferSpec
from kvferry.cli.bench_tables import plan_table, rooms_table, transfer_table
from kvferry.cli.main import app

MACHINE = {
    "settings": {}, "load_average": [0.5, 0.4, 0.3], "processors": 2,
    "versions": {"python": "3.11.7", "kernel": "6.1", "numpy": "2"},
}  # fmt: skip
ENGINE = {"mechanism": "auto", "peers": {"1.1": "cma (ready)"}}
MODE = Mode(Times(0.020, 0.018, 0.030, 30), 5.0, 12.0, 21.5, 0.71, 0.74, None, None, None, None)


def shown(table):
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    return out.getvalue()


def report(**changes):
    plain = TransferReport(
        spec=TransferSpec(pages=1, layers=2, repeats=30), nbytes=131072, modes={"sample": MODE},
        memcpy=Times(0.0142, 0.013, 0.02, 30), stream=None, bare=None, digest_added_percent={}, bytes_equal=True,
        rounds_checked=32, pool_page_bytes={"prefill": 2 << 20, "decode": 4096}, engine_info=ENGINE, machine=MACHINE,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def test_a_transfer_is_shown_beside_the_memcpy():
    text = shown(transfer_table(report()))
    rows = {line.split("  ")[1]: line.split() for line in text.splitlines() if line.startswith("  ")}
    assert rows["median, ms"][-2:] == ["20.00", "14.20"]
    assert rows["of memcpy (best)"][-2:] == ["0.71", "(0.74)"]
    assert rows["CPU decode, ms"][-1] == "21.50"
    assert "of stream" not in text
    for words in ("131,072 bytes: 2 layers, 1 page of 65536 bytes", "decode waits by yield", "30 rounds",
                  "every byte equal in 32 rounds", "prefill 2048 KiB, decode 4 KiB", "cma (ready)",
                  "load 0.50 0.40 0.30, 2 processors, Python 3.11.7"):  # fmt: skip
        assert words in " ".join(text.split()), words


def test_digests_and_a_stream_have_columns_of_their_own():
    stream = Times(0.03, 0.02, 0.04, 30)
    mode = msgspec.structs.replace(MODE, stream_ratio=1.5, stream_ratio_best=1.11)
    text = shown(transfer_table(report(
        modes={"off": mode, "sample": mode}, stream=stream, digest_added_percent={"sample": 1.26, "full": -0.04},
    )))  # fmt: skip
    assert text.splitlines()[1].split() == ["digest", "off", "digest", "sample", "memcpy", "stream"]
    assert text.count("1.50 (1.11)") == 2
    assert "added by the digest: sample +1.3 %, full -0.0 %" in text


def test_a_bare_library_has_two_columns_and_what_batches_cost():
    times = Times(0.019, 0.0171, 0.02, 30)
    bare = BareResult(times, msgspec.structs.replace(times, median_s=0.0165), 2048, 8, 15.25, 12.04)
    mode = msgspec.structs.replace(MODE, bare_ratio=0.95, bare_ratio_best=0.94)
    text = " ".join(shown(transfer_table(report(modes={"off": mode}, bare=bare))).split())
    assert "digest off memcpy bare bare, one batch" in text
    assert "median, ms 20.00 14.20 19.00 16.50" in text
    assert "of bare (best) 0.95 (0.94)" in text
    assert "2,048 rows in batches of kvferry's size, 8 of them, 15.25 ms of CPU" in text
    assert "batches cost +12.0 % against one" in text


def test_a_model_is_shown_with_its_grids_and_what_was_left_out():
    case = ModelCase(
        model="qwen3-8b", prefill="tp=2", decode="", tokens=512, layers=36, tokens_asked=4096, model_layers=36,
        nbytes=1, ranks={"prefill": 2, "decode": 1},
    )  # fmt: skip
    text = " ".join(shown(transfer_table(report(spec=TransferSpec(case=case)))).split())
    sides = "prefill tp=2 (2 ranks in one process), decode one rank (1 rank in one process)"
    assert f"qwen3-8b, 512 tokens, 36 layers; {sides}" in text
    assert "scaled down, memory is short: 512 of 4,096 tokens" in text
    less = msgspec.structs.replace(case, layers=9)
    assert scaled_in_words(less).endswith("512 of 4,096 tokens and 9 of 36 layers")
    assert scaled_in_words(msgspec.structs.replace(case, tokens_asked=512)) == ""


def test_rooms_are_shown_as_far_as_they_were_measured():
    full = RoomsReport(
        spec=RoomsSpec(), latency={"yield": Latency(0.1234, 0.5, 300)}, rooms_per_s=2345.6,
        idle={"decode": Idle(0.126, 50.04, 33.0)}, peers={"decode": PeerCost({1: 50.0, 1000: 133.0}, 81.25, 6022)},
        bytes_equal=True, engine_info=ENGINE, machine=MACHINE,
    )  # fmt: skip
    text = shown(rooms_table(full))
    for words in ("p50 0.123 ms, p99 0.500 ms, 300 samples", "2346 rooms/s, 64 in flight", "0.13 % of a processor",
                  "RSS 50.0 MB, PSS 33.0 MB", "1: 50.0 MB, 1000: 133.0 MB; 81.2 KB a peer"):  # fmt: skip
        assert words in text, text
    one = PeerCost({1: 50.0}, None, 22)
    text = shown(
        rooms_table(msgspec.structs.replace(full, latency={}, rooms_per_s=None, idle={}, peers={"decode": one}))
    )
    assert "1: 50.0 MB" in text
    assert "KB a peer" not in text
    assert "rooms/s" not in text


def test_a_mode_is_the_median_of_its_rounds():
    samples = [Sample(seconds, 0.001 * number, 0.002) for number, seconds in enumerate((0.5, 0.1, 0.2))]
    bare = bare_of([Sample(0.3, 0.004), Sample(0.1, 0.002), Sample(0.1, 0.003)], [Sample(0.2, 0.0)] * 3, 7, 2)
    mode = mode_of(65536, samples, Times(0.1, 0.05, 0.2, 3), Times(0.4, 0.2, 0.5, 3), bare)
    assert (mode.times.median_s, mode.prefill_cpu_ms, mode.decode_cpu_ms) == (0.2, 1.0, 2.0)
    assert mode.gb_per_s == pytest.approx(65536 / 0.2 / 1e9)
    assert mode.memcpy_ratio == pytest.approx(0.5)
    assert mode.memcpy_ratio_best == pytest.approx(0.05 / mode.times.best_decile_s)
    assert mode.stream_ratio == pytest.approx(2.0)
    assert mode.bare_ratio == pytest.approx(0.1 / 0.2)
    assert (bare.rows, bare.batches, bare.prefill_cpu_ms, bare.one_batch.median_s) == (7, 2, 3.0, 0.2)
    assert bare.batching_percent == pytest.approx(-50)
    assert mode_of(1, samples, bare.times, None, None).bare_ratio is None


def test_what_a_digest_adds_is_taken_from_pairs_of_one_round():
    def series(*seconds):
        return [Sample(each, 0.0, 0.0) for each in seconds]

    found = added_by_digests({"off": series(1, 2, 4), "sample": series(1.1, 2.0, 4.8), "full": series(2, 4, 8)})
    assert found == {"sample": pytest.approx(10), "full": pytest.approx(100)}
    assert statistics.median([1.1, 2.0, 4.8]) / 2 == 1.0  # the ratio of the medians would say that it costs nothing
    assert added_by_digests({"sample": series(1, 2)}) == {}


OPTIONS = {
    "transfer": {
        "--engine", "--mechanism", "--layers", "--pages", "--page-bytes", "--order", "--inflight", "--repeats",
        "--pool", "--digest", "--compare-digest", "--layout", "--wait", "--seed", "--quick", "--json",
        "--model", "--tokens", "--prefill", "--decode", "--bare", "--forward-ms",
    },
    "rooms": {
        "--engine", "--mechanism", "--request-bytes", "--modes", "--samples", "--rooms", "--window", "--idle-s",
        "--peers", "--digest", "--quick", "--json",
    },
}  # fmt: skip


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_has_a_help_text(command):
    found = app["bench"][command].assemble_argument_collection(parse_docstring=True)
    options = {option.name: option.parameter.help for option in found}
    assert set(options) == OPTIONS[command]
    assert all(options.values()), options


def test_the_table_of_plans_has_rows_times_and_rates():
    cases = [
        CaseResult("scattered", 124_928, 0.0025, 49_971_200.0, 0.002, 1_500_000),
        CaseResult("contact", 0, 0.01, 0.0, 0.009, 10),
    ]
    text = shown(plan_table(PlanReport(PlanSpec(), cases, MACHINE)))
    scattered, contact = (next(line for line in text.splitlines() if name in line) for name in ("scattered", "contact"))
    assert scattered.split()[1:] == ["124,928", "2.50", "50", "1.5"]
    assert contact.split()[1:] == ["10.00", "0.0"]
    assert "Python 3.11.7" in text
