"""`kvferry explain` as a user runs it: tables, JSON, a picture, findings and bad input, each with its exit code."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "kvferry", "explain", *words], capture_output=True, text=True, timeout=100, check=False
    )


def test_the_example_of_the_documentation():
    ended = run("--model", "deepseek-r1", "--tokens", "32768", "--prefill", "tp=8", "--decode", "tp=1")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"{61 * 1152 * 32768:,} bytes in 124,928 rows" in ended.stdout
    assert "room 0 elects tp0, another room may elect tp1, tp2, ... tp7" in " ".join(ended.stdout.split())


def test_as_json_with_a_picture(tmp_path):
    path = tmp_path / "moves.svg"
    ended = run(
        "--model", "qwen3-next-80b-a3b", "--prefill", "tp=8", "--decode", "tp=2,cache=vllm-hnd", "--tokens", "1000",
        "--prefix", "100", "--room", "3", "--json", "--svg", str(path),
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    answer = json.loads(ended.stdout)
    assert answer["bytes"] == 12 * 2 * 2 * 256 * 2 * 900 + 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    assert sum(total["bytes"] for total in answer["destinations"]) == answer["bytes"]
    assert ET.parse(path).getroot().tag.endswith("svg")


def test_sides_that_do_not_fit_are_a_finding():
    ended = run("--model", "llama-3.1-8b", "--prefill", "tp=2", "--decode", "tp=2,dtype=int8")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "dtype: prefill has 'bfloat16', decode has 'int8'" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--model llama-3.1-8", "unknown model 'llama-3.1-8' (did you mean llama-3.1-8b"),
        ("--model llama-3.1-8b --prefill tp=x", "--prefill: 'tp=x': tp=x is not a whole number"),
        ("--model llama-3.1-8b --tokens 0", "--tokens 0 is not within 1 and 1048576"),
        ("", "--model"),
    ],
)
def test_bad_input_is_one_line(words, text):
    ended = run(*words.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("kvferry: error: ")
    assert text in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_help_explains_the_grid():
    ended = run("--help")
    assert ended.returncode == 0
    words = " ".join(ended.stdout.split())
    assert "tp=4,pp=2,page=64" in words
    assert "zigzag" in words
