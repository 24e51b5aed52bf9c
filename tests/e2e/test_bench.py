"""`kvferry bench` as a user runs it: real processes. What is measured is not judged here, what is found wrong is."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine_here import need
from kvferry.bench import children
from kvferry.bench.transfer_spec import TransferSpec
from kvferry.cli.main import main

CASE = {"case", "rows", "seconds", "rows_per_s", "best_s", "peak_bytes"}
SPOILT = str(Path(__file__).parent / "spoilt_bench.py")
TRANSFER = ("bench", "transfer", "--quick", "--pages", "24", "--page-bytes", "4096", "--repeats", "2")
ROOMS = ("bench", "rooms", "--quick")
TIMES = {"median_s", "best_decile_s", "p99_s", "samples"}


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert psutil.Process().children(recursive=True) == []


def bench(*arguments, **variables):
    ended = subprocess.run(
        [sys.executable, "-m", "kvferry", *arguments, "--json"], check=False, capture_output=True, text=True,
        timeout=110, env={**os.environ, **variables},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "every byte equal" in ended.stderr or "machine" in ended.stderr
    (line,) = ended.stdout.splitlines()
    return json.loads(line)


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ("", "cma"),
        ("--mechanism tcp", "tcp"),
        ("--order contig --inflight 3 --wait wait", "cma"),
        ("--order reverse --layout layer --layers 3 --wait nap", "cma"),
        ("--pool memfd --mechanism cma --layout layer --layers 2 --inflight 24 --wait busy", "cma"),
    ],
)
def test_transfers_are_measured_and_every_byte_is_compared(options, used):
    found = bench(*TRANSFER, *options.split())
    assert set(found) == {
        "spec", "nbytes", "modes", "memcpy", "stream", "bare", "digest_added_percent", "bytes_equal", "rounds_checked",
        "pool_page_bytes", "engine_info", "machine",
    }  # fmt: skip
    assert (found["bytes_equal"], found["bare"]) == (True, None)
    assert found["rounds_checked"] == 3  # one to warm up
    assert found["nbytes"] == found["spec"]["layers"] * 24 * 4096
    (mode,) = found["modes"].values()
    assert set(mode) == {
        "times", "gb_per_s", "prefill_cpu_ms", "decode_cpu_ms", "memcpy_ratio", "memcpy_ratio_best", "stream_ratio",
        "stream_ratio_best", "bare_ratio", "bare_ratio_best",
    }  # fmt: skip
    assert set(mode["times"]) == set(found["memcpy"]) == TIMES
    assert mode["times"]["samples"] == found["memcpy"]["samples"] == 2
    assert min(mode["times"].values()) > 0
    assert mode["memcpy_ratio"] == pytest.approx(found["memcpy"]["median_s"] / mode["times"]["median_s"])
    assert set(found["pool_page_bytes"]) == {"prefill", "decode"}
    assert [text.split()[0] for text in found["engine_info"]["peers"].values()] == [used]
    assert {"load_average", "processors", "settings", "versions"} == set(found["machine"])
    if used == "tcp":
        assert mode["stream_ratio"] == pytest.approx(found["stream"]["median_s"] / mode["times"]["median_s"])
    else:
        assert (found["stream"], mode["stream_ratio"]) == (None, None)


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "ranks", "nbytes"),
    [
        ("llama-3.1-8b", "tp=2", "order=hnd,arrange=block,page=64", [2, 1], 100 * 32 * 2 * 8 * 128 * 2),
        ("gpt-oss-20b", "pp=2", "tp=2", [2, 2], (100 + 100) * 12 * 2 * 8 * 64 * 2),
        ("deepseek-r1", "", "cp=2", [1, 2], 100 * 61 * 576 * 2),
    ],
)
def test_a_models_request_is_measured_between_two_grids(model, prefill, decode, ranks, nbytes):
    options = ("--model", model, "--prefill", prefill, "--decode", decode, "--tokens", "100", "--repeats", "1")
    found = bench("bench", "transfer", "--quick", *options, "--inflight", "2")
    assert found["nbytes"] == found["spec"]["case"]["nbytes"] == 2 * nbytes
    assert found["spec"]["case"]["ranks"] == dict(zip(("prefill", "decode"), ranks, strict=True))
    assert found["rounds_checked"] == 2
    assert len(found["engine_info"]["peers"]) == ranks[0] * ranks[1]


@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_an_engine_is_measured_against_its_own_library(engine):
    need(engine)
    found = bench(*TRANSFER, "--engine", engine, "--bare")
    bare, (mode,) = found["bare"], found["modes"].values()
    assert (bare["rows"], bare["batches"]) == (24, 1)
    assert bare["times"]["samples"] == bare["one_batch"]["samples"] == 2
    assert mode["bare_ratio"] == pytest.approx(bare["times"]["median_s"] / mode["times"]["median_s"])
    assert found["rounds_checked"] == 9  # one of each kind to warm up
    assert bench(*TRANSFER, "--engine", engine, "--no-bare")["bare"] is None


def test_digests_are_measured_in_turns():
    found = bench(*TRANSFER, "--compare-digest", "--pool", "memfd")
    assert set(found["modes"]) == {"off", "sample", "full"}
    assert [mode["times"]["samples"] for mode in found["modes"].values()] == [2, 2, 2]
    assert set(found["digest_added_percent"]) == {"sample", "full"}
    assert found["rounds_checked"] == 9
    assert found["spec"]["pool"] == "memfd"


def test_rooms_are_measured():
    found = bench(*ROOMS, KVFERRY_BATCH_ROWS="4096")
    assert set(found) == {
        "spec", "latency", "rooms_per_s", "idle", "peers", "bytes_equal", "engine_info", "machine",
    }  # fmt: skip
    assert found["bytes_equal"] is True
    assert set(found["latency"]) == {"wait", "nap", "yield", "busy", "busy_short_switch"}
    for latency in found["latency"].values():
        assert latency["samples"] == 20
        assert 0 < latency["p50_ms"] <= latency["p99_ms"]
    assert found["rooms_per_s"] > 0
    assert set(found["idle"]) == set(found["peers"]) == {"prefill", "decode"}
    for idle in found["idle"].values():
        assert idle["cpu_percent"] >= 0
        assert idle["rss_mb"] >= idle["pss_mb"] > 0
    for cost in found["peers"].values():
        assert set(cost) == {"rss_mb", "kb_per_peer", "open_files"}
        assert set(cost["rss_mb"]) == {"1", "3"}
    assert found["machine"]["settings"] == {"batch_rows": 4096}


def test_plans_are_measured():
    found = bench("bench", "plan", "--quick")
    assert set(found) == {"spec", "cases", "machine"}
    assert all(set(case) == CASE and case["seconds"] > 0 for case in found["cases"])


def test_parts_are_left_out_where_they_are_not_wanted(capsys):
    assert main([*ROOMS, "--modes", "wait", "--rooms", "0", "--idle-s", "0", "--peers", ""]) == 0
    out, err = capsys.readouterr()
    assert "p50" in out
    assert not any(word in out for word in ("rooms/s", "idle", "with peers"))
    assert err.startswith("bench: wait: p50 ")


@pytest.fixture
def spoilt(monkeypatch):
    """spoilt(kind): from now on the worker processes do this wrong."""

    def choose(kind):
        monkeypatch.setattr(children, "COMMAND", (sys.executable, SPOILT, kind))

    return choose


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("one bit", "round 3: byte [0-9]+ of page [0-9]+, tensor 0, differs; the page is one which holds page"),
        ("the round before", "round 3: byte 0 of page [0-9]+, tensor 0, differs"),
        ("other pages", "round 3: byte 0 of page [0-9]+, tensor 0, differs"),
        ("a guard", "round 3: byte 4088 of page [0-9]+, tensor 0, differs; the page is one which belongs to no room"),
    ],
)
def test_wrong_bytes_of_a_transfer_are_said_and_are_exit_code_1(kind, words, spoilt, capfd):
    spoilt(kind)
    assert main([*TRANSFER, "--json"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert_error(err, f"wrong bytes at the decode side: {words}")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("one element", "round 3: rank .*: k of layer 0, head 2, token 99: byte 0 differs"),
        ("elements of the round before", "round 3: rank .*: k of layer 0, head 0, token 0: byte 0 differs"),
        (
            "a guard of the model's",
            "round 3: byte [0-9]+ of the memory of rank .* differs, which belongs to no request",
        ),
    ],
)
def test_wrong_bytes_of_a_models_request_are_said_and_are_exit_code_1(kind, words, spoilt, capfd):
    spoilt(kind)
    options = ("--model", "smollm2-135m", "--tokens", "100", "--repeats", "2")
    assert main(["bench", "transfer", "--quick", *options, "--json"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert_error(err, f"wrong bytes at the decode side: {words}")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("one bit", "room 3, byte 32768 of page 4 differs"),
        ("no stamp", r"room [0-9]+, page [0-9]+ begins and ends with .*, \([0-9]+, [0-9]+\) was sent"),
    ],
)
def test_wrong_bytes_of_a_room_are_said_and_are_exit_code_1(kind, words, spoilt, capfd):
    spoilt(kind)
    assert main([*ROOMS, "--modes", "yield", "--json"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert_error(err, f"decode process: wrong bytes at the decode side: {words}")


def test_a_room_that_fails_is_told_with_its_cause(spoilt, capfd):
    spoilt("a failing engine")
    assert main(TRANSFER) == 1
    assert_error(capfd.readouterr().err, "process: room 2 failed: write_failed: .*the cable is cut")


@pytest.mark.parametrize(
    ("kind", "command", "words"),
    [
        ("death of prefill", TRANSFER, "the prefill process ended early, with exit code 9"),
        ("death of decode", ROOMS, "the decode process ended early, with exit code 9"),
        ("hang of decode", TRANSFER, "the decode process did not answer 'check' within 1 s"),
    ],
)
def test_a_worker_that_dies_or_hangs_ends_the_measurement(kind, command, words, spoilt, capfd, monkeypatch):
    if kind.startswith("hang"):
        monkeypatch.setattr(TransferSpec, "round_limit_s", -29.0)  # a step may take half a minute more
    spoilt(kind)
    assert main([*command]) == 1
    assert_error(capfd.readouterr().err, words)


def assert_error(text, words):
    last = text.splitlines()[-1]
    assert last.startswith("kvferry: error: ")
    assert re.search(words, last), text


@pytest.mark.parametrize("said", ["warming up", "connected"])
def test_an_interrupt_ends_everything(said):
    crowd = ["rooms", "--quick", "--modes", "", "--rooms", "0", "--idle-s", "0", "--peers", "1,99"]
    command = ["transfer", "--repeats", "9999"] if said == "warming up" else crowd
    running = subprocess.Popen(
        [sys.executable, "-m", "kvferry", "bench", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    with running:
        next(line for line in running.stderr if said in line)
        workers = psutil.Process(running.pid).children(recursive=True)
        begun_s = time.monotonic()
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
        out, err = running.communicate(timeout=30)
    assert (running.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert len(workers) >= 2
    assert not any(worker.is_running() for worker in workers)
    assert time.monotonic() - begun_s < 15


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("transfer --pages 0", "--pages 0 is below 1"),
        ("transfer --order random", "--order 'random' is not known .one of contig, shuffle, reverse.$"),
        ("transfer --pages 2 --inflight 3", "--inflight 3 is above --pages 2"),
        ("transfer --pages many", 'unable to convert "many"'),
        ("transfer --digest off --compare-digest", "--digest and --compare-digest were both given"),
        ("transfer --digest crc", "--digest 'crc' is not known .one of off, sample, full"),
        ("transfer --mechanism udp", "process: option 'mechanism' of the local engine is 'udp' .one of auto"),
        ("transfer --engine local --bare", "--bare: no way is known to drive what is below the engine 'local'"),
        ("transfer --tokens 100", "--tokens was given without --model"),
        ("transfer --model qwen3-8b --pages 7", "--pages and --model were both given"),
        ("transfer --model qwen3-8b --decode tp=2,draft=1", "--decode: draft=1: qwen3-8b has no draft layers"),
        ("transfer --model qwen3-8b --decode dtype=float32", "--prefill and --decode do not fit: .*float32"),
        ("transfer --model qwen", "unknown model 'qwen'"),
        ("transfer now", "unexpected argument 'now'"),
        ("rooms --peers 1,many", "--peers '1,many' is no list of numbers"),
        ("rooms --peers 3,1", "--peers 3,1 are not ascending numbers"),
        ("rooms --modes spin", "--modes 'spin' is not known .one of wait"),
        ("rooms --engine locl", "no engine is called 'locl'"),
        ("plan --repeats 0", "--repeats 0 is below 1"),
        ("nonsense", 'Unknown command "nonsense".*transfer, rooms'),
    ],
)
def test_mistakes_are_one_clear_line_and_exit_code_2(command, words, capfd):
    assert main(["bench", *command.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert_error(err, words)
