"""`kvferry demo` as a user runs it: real processes, the real model."""

import json
import os
import subprocess
import sys

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


def test_a_short_prompt_and_the_summary():
    ended = demo("--prompt", "What is the capital of France?", "--max-new-tokens", "8")
    assert ended.returncode == 0, ended.stderr
    assert "equal to the last bit" in ended.stdout
    assert "of a memcpy" in ended.stdout
    assert "Paris" in ended.stdout
