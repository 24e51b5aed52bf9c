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
