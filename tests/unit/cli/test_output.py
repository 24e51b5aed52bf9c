"""What the command does where its standard output is closed, full or of no width, and with odd text."""

import contextlib
import io
import os
import signal
import subprocess
import sys

import pytest

from kvferry.cli.main import main

EXPLAIN = ["explain", "--model", "llama-3.1-8b", "--tokens", "16"]


def shell(arguments, redirect, **environment):
    command = " ".join([sys.executable, "-m", "kvferry", *arguments, redirect])
    given = {**os.environ, **environment}
    line = ["bash", "-c", f"set -o pipefail; {command}"]
    return subprocess.run(line, env=given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [EXPLAIN, [*EXPLAIN, "--json"], ["--version"], ["--help"]])
def test_a_full_disk_is_one_line(arguments):
    done = shell(arguments, ">/dev/full")
    assert (done.returncode, done.stderr) == (2, "kvferry: error: standard output: No space left on device\n")


@pytest.mark.parametrize("arguments", [EXPLAIN, [*EXPLAIN, "--json"], ["--help"]])
def test_a_reader_that_has_seen_enough_is_told_by_the_exit_code(arguments):
    big = ["explain", "--model", "deepseek-r1", "--prefill", "tp=16", "--decode", "tp=16", *arguments[5:]]
    done = shell(big if arguments[0] == "explain" else arguments, "| (exec <&-; sleep 2)")
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_closed_standard_output_is_no_error():
    done = shell(EXPLAIN, ">&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_another_standard_output_is_written_to():
    with contextlib.redirect_stdout(io.StringIO()) as written:
        assert main([*EXPLAIN, "--json"]) == 0
    assert written.getvalue().startswith("{")


@pytest.mark.parametrize("columns", ["0", "-1", "x", "3"])
def test_a_terminal_without_a_width_has_the_usual_one(columns):
    assert len(shell(EXPLAIN, "", COLUMNS=columns).stdout) > 500
    assert "Usage" in shell(["--help"], "", COLUMNS=columns).stdout


def test_a_prompt_that_is_no_text_is_one_line():
    done = shell(["demo", "--prompt", "$'h \\xff x'"], "")
    assert (done.returncode, done.stderr) == (2, "kvferry: error: --prompt is not UTF-8 text\n")


def test_a_room_that_no_node_takes_is_refused(capsys):
    assert main([*EXPLAIN, "--room", str(2**64)]) == 2
    assert "is not within 0 and 2**64 - 1" in capsys.readouterr().err
