"""What a user mistypes is one clear line and exit code 2, and never a traceback."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from kvferry.cli.main import main


@pytest.fixture
def files(tmp_path):
    (tmp_path / "random.gguf").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    return tmp_path


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def own_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


COMMANDS = {
    "an unknown command": ("nonsense", 'Unknown command "nonsense".*demo, bootstrap, engines, explain, simulate'),
    "an unknown option": ("demo --enginee local", "Unknown option: --enginee. Did you mean --engine"),
    "one word too many": ("demo now", r"unexpected argument 'now' \(only options are taken"),
    "two words too many": ("demo right now", "unexpected arguments 'right', 'now'"),
    "an option without its value": ("demo --engine", "--engine"),
    "an unknown engine": ("demo --engine locl", "'locl' .did you mean 'local'. known: .*local, mooncake, mori"),
    "an engine whose library is missing": ("demo --engine mori", "MORI can't be imported: .*pip install amd-mori"),
    "the same in capitals": ("demo --engine MORI", "MORI can't be imported: .*pip install amd-mori"),
    "an empty prompt": ("demo --prompt=", "the prompt is empty"),
    "a blank prompt": ("demo --prompt=\t\t", "the prompt is empty"),
    "a prompt that is too long": (
        f"demo --prompt={'word' * 40000}",
        r"takes at most 7000 prompt tokens .shorten it.\n",
    ),
    "a prompt that leaves no room": (
        "demo --max-new-tokens 8000",
        r"at most 192 fit into .* context of 8192.*lower --max-new-tokens",
    ),
    "two prompts": ("demo --prompt a --file b", "--prompt and --file were both given"),
    "a file that is not there": ("demo --file {files}/none.txt", "none.txt: No such file or directory\n"),
    "a folder as a file": ("demo --file {files}", "Is a directory"),
    "a file that is no text": ("demo --file {files}/binary.txt", "binary.txt is not UTF-8 text"),
    "a model that is not there": ("demo --model {files}/none.gguf", "none.gguf.*(no|not|does not)"),
    "a folder as a model": ("demo --model {files}", "model {files} is a directory"),
    "a foreign model file": ("demo --model {files}/random.gguf", "random.gguf.*GGUF"),
    "an empty model file": ("demo --model {files}/empty.gguf", "empty.gguf.*GGUF"),
    "a model file that is cut off": ("demo --model {files}/short.gguf", "short.gguf.*GGUF"),
    "no tokens": ("demo --max-new-tokens 0", "--max-new-tokens 0 is below 1"),
    "more tokens than the context": ("demo --max-new-tokens 99999999999999", "has a context of 8192 tokens"),
    "tokens that are no number": ("demo --max-new-tokens some", 'unable to convert "some"'),
    "a grid with an unknown key": (
        "demo --prefill pge=2",
        r"--prefill: 'pge=2': 'pge=2' is not known .did you mean page",
    ),
    "a grid that does not fit the model": ("demo --decode stages=1/2,pp=2", "--decode: stages=1/2: .*30 layers"),
    "DP groups": ("demo --decode dp=2", "--decode: dp=2, but the demo has one request"),
    "too many ranks": ("demo --prefill tp=5,pp=5", "25 prefill and 1 decode ranks: .* at most 24"),
    "grids that do not fit together": (
        "demo --decode dtype=bfloat16",
        "do not fit together: dtype: prefill has 'float16', decode has 'bfloat16'; use the same",
    ),
    "a port in use": ("bootstrap --port {port}", r"127\.0\.0\.1:{port} can't be bound: the port is in use"),
    "a port that is no number": ("bootstrap --port http", 'unable to convert "http"'),
    "a port that does not exist": ("bootstrap --port 65536", "port 65536 is not within 0 and 65535"),
    "a negative port": ("bootstrap --port -1", "port -1 is not within"),
    "an address that others reach": ("bootstrap --host 0.0.0.0 --port 0", "lets other hosts register without a token"),
    "a host that does not resolve": ("bootstrap --host nowhere.invalid", "'nowhere.invalid' can't be resolved"),
    "an address of another host": ("bootstrap --host 192.0.2.1 --insecure", "192.0.2.1:8998 can't be bound"),
    "no rooms": ("simulate --rooms 0", "--rooms 0 is below 1"),
    "rooms that are no number": ("simulate --rooms many", 'unable to convert "many"'),
    "a seed that is no number": ("simulate --seed x", 'unable to convert "x"'),
}
IN_A_PROCESS = ["an unknown command", "an unknown option", "an unknown engine", "a foreign model file", "a port in use"]


def parts(name, files, port):
    command, words = COMMANDS[name]
    arguments = [part.replace("{files}", str(files)).replace("{port}", str(port)) for part in command.split(" ")]
    return arguments, words.replace("{files}", re.escape(str(files))).replace("{port}", str(port))


def is_one_clear_line(text, words):
    assert text.startswith("kvferry: error: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert re.search(words, text), text


@pytest.mark.parametrize("name", COMMANDS)
def test_mistakes_are_one_clear_line(name, files, taken_port, capsys, caplog):
    arguments, words = parts(name, files, taken_port)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    is_one_clear_line(err, words)
    assert not caplog.records


@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_mistakes_are_exit_code_2_of_the_process(name, files, taken_port):
    arguments, words = parts(name, files, taken_port)
    ended = subprocess.run(
        [sys.executable, "-m", "kvferry", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    is_one_clear_line(ended.stderr, words)


@pytest.mark.parametrize("command", ["demo", "bootstrap"])
def test_a_mistyped_variable_is_found_before_anything_is_started(command, monkeypatch, capsys):
    monkeypatch.setenv("KVFERRY_SECRT", "hush")
    assert main([command]) == 2
    is_one_clear_line(capsys.readouterr().err, r"unknown environment variable KVFERRY_SECRT .*KVFERRY_SECRET\?")


def test_what_a_worker_finds_wrong_comes_out_as_its_one_line():
    ended = subprocess.run(
        [sys.executable, "-m", "kvferry", "demo", "--max-new-tokens", "2", "--json"], capture_output=True, text=True,
        timeout=60, env={**os.environ, "KVFERRY_ENGINE_OPTIONS": "mechanism=udp"}, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    is_one_clear_line(ended.stderr.splitlines(keepends=True)[-1], "worker: option 'mechanism' .* is 'udp' .one of auto")
    assert "Traceback" not in ended.stderr


def test_a_reader_that_has_seen_enough_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "kvferry", "simulate", "--rooms", "1"], stdout=closed, stderr=subprocess.PIPE,
            text=True, timeout=30, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")
