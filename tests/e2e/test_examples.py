"""The README's two example workers, as they stand."""

import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_the_two_workers_of_the_readme_hand_a_request_over():
    prefill = subprocess.Popen([sys.executable, EXAMPLES / "prefill.py"], stdout=subprocess.PIPE, text=True)
    try:
        assert prefill.stdout.readline() == "prefill is ready\n"
        decode = subprocess.run(
            [sys.executable, EXAMPLES / "decode.py"], check=True, capture_output=True, text=True, timeout=60
        )
        assert decode.stdout == "received 92160 bytes, first token 1234\n"
        assert prefill.communicate(timeout=60)[0] == "handed over 92160 bytes\n"
        assert prefill.returncode == 0
    finally:
        prefill.kill()
        prefill.wait()


def test_the_readme_shows_the_examples_as_they_are():
    readme = (EXAMPLES.parent / "README.md").read_text()
    for name in ("prefill.py", "decode.py"):
        text = (EXAMPLES / name).read_text()
        assert text[text.index("Manager = ") :].strip() in readme, f"README.md shows another {name}"


def test_the_page_on_testing_shows_tests_that_pass():
    text = (EXAMPLES / "test_integration.py").read_text()
    assert text[text.index("MODEL = ") :].strip() in (EXAMPLES.parent / "docs/testing.md").read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", EXAMPLES / "test_integration.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert "2 passed" in done.stdout, done.stdout


def test_an_engine_of_its_own_hands_kv_cache_and_state_over_between_two_grids():
    script = [sys.executable, EXAMPLES / "own_engine.py"]
    prefill = subprocess.Popen([*script, "prefill", "tp=2,cp=2,deal=zigzag"], stdout=subprocess.PIPE, text=True)
    try:
        assert prefill.stdout.readline() == "prefill is ready\n"
        decode = subprocess.run([*script, "decode", "tp=4"], check=True, capture_output=True, text=True, timeout=60)
        kv_bytes, state_bytes = 2 * 45 * 2 * 64 * 2, 2 * (96 * 2 + 128 * 4)  # of one of four heads
        lines = [f"decode dp0 pp0 cp0 tp{tp} {kv_bytes + state_bytes} bytes" for tp in range(4)]
        assert decode.stdout.splitlines() == lines
        sent = [int(line.split()[-2]) for line in prefill.communicate(timeout=60)[0].splitlines()]
        assert (len(sent), sum(sent)) == (4, 4 * (kv_bytes + state_bytes))
        assert prefill.returncode == 0
    finally:
        prefill.kill()
        prefill.wait()
