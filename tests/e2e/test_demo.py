"""`kvferry demo` as a user runs it: real processes, the real model."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest


def demo(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "kvferry", "demo", *arguments], check=False, capture_output=True, text=True, timeout=110,
        env={**os.environ, **variables},
    )  # fmt: skip


@pytest.mark.parametrize("options", ["", "mechanism=tcp"], ids=["shared memory of one host", "tcp"])
def test_the_decode_process_goes_on_from_the_same_bytes(options):
    ended = demo("--max-new-tokens", "12", "--json", KVFERRY_ENGINE_OPTIONS=options)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert list(found) == [
        "engine", "tokens_equal", "logits_equal", "kv_bytes_equal", "kv_bytes", "transfer_s", "gb_per_s",
        "memcpy_ratio", "ttft_s", "text",
    ]  # fmt: skip
    assert (found["tokens_equal"], found["logits_equal"], found["kv_bytes_equal"]) == (True, True, True)
    assert found["engine"] == "local"
    assert found["kv_bytes"] % 23_040 == 0
    assert found["kv_bytes"] > 300 * 23_040
    assert found["text"].strip()
    stages = ended.stderr.splitlines()
    assert any(line.startswith("prefill: computing ") for line in stages)
    assert "decode: waiting for the pages" in stages
    assert {"prefill: done", "decode: done"} <= set(stages)


def test_a_short_prompt_and_the_summary():
    ended = demo("--prompt", "What is the capital of France?", "--max-new-tokens", "8")
    assert ended.returncode == 0, ended.stderr
    assert "equal to the last bit" in ended.stdout
    assert "of a memcpy" in ended.stdout
    assert "Paris" in ended.stdout


@pytest.mark.parametrize("stage", ["loading the model", "computing"])
def test_an_interrupt_ends_everything_at_once(stage):
    running = subprocess.Popen(
        [sys.executable, "-m", "kvferry", "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    with running:
        said = next(line for line in running.stderr if stage in line)
        workers = psutil.Process(running.pid).children(recursive=True)
        begun_s = time.monotonic()
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
        out, err = running.communicate(timeout=30)
    assert said.startswith(("prefill: ", "decode: "))
    assert (running.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)
    assert time.monotonic() - begun_s < 10
