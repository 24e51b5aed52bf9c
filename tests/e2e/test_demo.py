"""`kvferry demo` as a user runs it: real processes, the real model."""

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
from kvferry.cli import main as command
from kvferry.cli import run_demo

PROMPT = (
    "Tell me in a few plain sentences why a ferry line that keeps careful lists of its crates is more reliable than "
    "one that only trusts its captains. Think of harbours with long and with short piers, of luggage sorted by owner "
    "or by size, and of a boat that lost its engine half way and came in late one night."
)
FIELDS = [
    "engine", "tokens_equal", "logits_equal", "kv_bytes_equal", "kv_bytes", "transfer_s", "gb_per_s", "memcpy_ratio",
    "ttft_s", "text", "prefill", "decode", "ranks",
]  # fmt: skip
TOKEN_BYTES = 23_040


def demo(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "kvferry", "demo", *arguments], check=False, capture_output=True, text=True, timeout=110,
        env={**os.environ, **variables},
    )  # fmt: skip


ENGINES = {
    "shared memory of one host": ("local", ""),
    "tcp": ("local", "mechanism=tcp"),
    "nixl": ("nixl", ""),
    "nixl by tcp": ("nixl", "param.engine_config=TLS=tcp"),
    "mooncake by tcp": ("mooncake", ""),
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_decode_process_goes_on_from_the_same_bytes(name):
    engine, options = ENGINES[name]
    need(engine)
    ended = demo("--engine", engine, "--max-new-tokens", "12", "--json", KVFERRY_ENGINE_OPTIONS=options)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert list(found) == FIELDS
    assert (found["tokens_equal"], found["logits_equal"], found["kv_bytes_equal"]) == (True, True, True)
    assert found["engine"] == engine
    assert found["kv_bytes"] % TOKEN_BYTES == 0
    assert found["kv_bytes"] > 300 * TOKEN_BYTES
    assert found["ranks"] == [1, 1]
    assert found["text"].strip()
    stages = ended.stderr.splitlines()
    assert any(line.startswith("prefill: computing ") for line in stages)
    assert "decode: waiting for the pages" in stages
    assert {"prefill: done", "decode: done"} <= set(stages)


GRIDS = {
    "tp 3 to 1": ("tp=3,page=16,order=nhd", "tp=1,page=32,order=hnd", [3, 1]),
    "tp 1 to 3": ("tp=1,page=32,order=hnd", "tp=3,page=16,order=nhd", [1, 3]),
    "pp 3 to 1": ("pp=3,arrange=block", "pp=1,page=32", [3, 1]),
    "pp 2 to 3": ("pp=2,stages=7/23", "pp=3,page=32,arrange=page", [2, 3]),
    "cp 2 to 1": ("cp=2", "page=32", [2, 1]),
    "decode context parallel": ("", "dcp=2,page=32,order=hnd", [1, 2]),
    "more ranks than heads": ("tp=2", "tp=4,page=8", [2, 4]),
    "all of it": (
        "tp=3,pp=2,cp=2,deal=zigzag,page=16,order=nhd,arrange=layer",
        "tp=2,pp=3,page=32,order=hnd,arrange=block",
        [12, 6],
    ),
}
RECEIVED = {"more ranks than heads": 4 / 3}
"""Of the whole cache, where not once: a head that two ranks hold is received twice."""


@pytest.mark.parametrize("name", GRIDS)
def test_any_grid_hands_over_to_any_other(name):
    prefill, decode, ranks = GRIDS[name]
    options = "mechanism=tcp" if name == "tp 3 to 1" else ""
    ended = demo(
        "--prompt", PROMPT, "--max-new-tokens", "8", "--json", "--prefill", prefill, "--decode", decode,
        KVFERRY_ENGINE_OPTIONS=options,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["tokens_equal"], found["logits_equal"], found["kv_bytes_equal"]) == (True, True, True)
    assert (found["prefill"], found["decode"], found["ranks"]) == (prefill, decode, ranks)
    tokens = int(re.search("computing ([0-9]+) tokens", ended.stderr)[1])
    assert 96 < tokens < 128
    assert tokens % 16
    assert found["kv_bytes"] == tokens * TOKEN_BYTES * RECEIVED.get(name, 1)
    done = [line for line in ended.stderr.splitlines() if line.endswith(": done")]
    assert len(set(done)) == sum(ranks)
    several = [line.startswith("prefill") for line in done if re.match("(prefill|decode)( (pp|cp|tp)[0-9]+)+: ", line)]
    assert (several.count(True), several.count(False)) == tuple(count if count > 1 else 0 for count in ranks)


def test_a_rank_without_a_share_of_a_short_request_takes_part():
    ended = demo("--prompt", "Hi", "--max-new-tokens", "2", "--json", "--prefill", "cp=3,page=32", "--decode", "dcp=2")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["ranks"] == [3, 2]


FAULTS = {
    "one bit": (
        "decode tp1",
        1,
        "decode tp1: layer [0-9]+, head [12], token [0-9]+, [kv], byte [0-9]+: 0x.. is not 0x..\n",
    ),
    "a stray byte": ("decode tp0", 1, "decode tp0: 1 bytes were written outside of the request's tokens\n"),
    "a hole": (
        "decode",
        1,
        "decode tp0 worker: no rank of this side holds layer 0, head 0, token 0, k and [0-9]+ more",
    ),
    "another first token": ("decode tp1", 1, ""),
    "another room's row": ("decode tp1", 1, "decode tp1 worker: the metadata row is of room [0-9]+, not of [0-9]+\n"),
    "death": ("decode tp1", 1, "the decode tp1 worker ended early, with exit code 9\n"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_rank_that_does_one_thing_wrong_is_found_out(kind, monkeypatch, capfd):
    who, code, says = FAULTS[kind]
    monkeypatch.setattr(run_demo, "WORKER", (str(Path(__file__).with_name("spoilt_demo.py")), kind, who))
    arguments = ["--prompt", "Hi", "--max-new-tokens", "2", "--prefill", "page=8", "--decode", "tp=2,page=32"]
    assert command.main(["demo", *arguments, "--json"]) == code
    out, err = capfd.readouterr()
    assert re.search(says, err), err
    if out:
        found = json.loads(out)
        assert found["kv_bytes_equal"] == (not says)


def test_a_short_prompt_and_the_summary():
    ended = demo("--prompt", "What is the capital of France?", "--max-new-tokens", "8")
    assert ended.returncode == 0, ended.stderr
    assert "equal to the last bit" in ended.stdout
    assert "of a memcpy" in ended.stdout
    assert "Paris" in ended.stdout


def begin(grid, folder):
    """A demo that goes on, in a session of its own, with its temporary files in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvferry", "demo", "--decode", grid], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip


@pytest.mark.parametrize("grid", ["", "tp=3"])
@pytest.mark.parametrize("stage", ["loading the model", "computing"])
def test_an_interrupt_ends_everything_at_once(stage, grid, tmp_path):
    with begin(grid, tmp_path) as running:
        said = next(line for line in running.stderr if stage in line)
        workers = psutil.Process(running.pid).children(recursive=True)
        begun_s = time.monotonic()
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
        out, err = running.communicate(timeout=30)
    assert said.startswith(("prefill: ", "decode: ", "decode tp"))
    assert (running.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert len(workers) == (4 if grid else 2)
    assert not list(tmp_path.iterdir())
    assert not any(worker.is_running() for worker in workers)
    assert time.monotonic() - begun_s < 10


def test_workers_leave_by_themselves_when_the_conductor_is_killed(tmp_path):
    with begin("tp=2", tmp_path) as running:
        assert any("waiting for the pages" in line for line in running.stderr)
        workers = psutil.Process(running.pid).children(recursive=True)
        running.kill()
        _, alive = psutil.wait_procs(workers, timeout=30)
        err = running.stderr.read()
    assert len(workers) == 3
    assert not alive
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())
