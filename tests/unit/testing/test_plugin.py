"""The pytest plug-in, in runs of its own: what it requires, skips and writes, and that it harms nobody."""

import os
import subprocess
import sys

import pytest

from kvferry.testing import matrix, settings
from kvferry.testing.plugin import _choose
from kvferry.testing.suite_memory import KINDS

ABSENT = """
from kvferry.engines import find
from kvferry.testing import EngineSuite
find.register("absent", "no_such_module:Engine", "pip install absent")

class TestAbsent(EngineSuite):
    engine_name = "absent"
"""

MIXED = """
import pytest
from kvferry.testing import EngineSuite

class TestLocal(EngineSuite):
    options = {"mechanism": "cma"}
    label = "mine"

    def test_of_its_own(self):
        assert self.provider().endswith(":memfd")

    def test_what_an_engine_says_of_itself_is_bytes_of_at_most_64_kib(self):
        assert not self.pair.target.engine.describe()

def test_that_is_not_of_the_suite():
    pass
"""

UNTOUCHED = """
import sys

def test_nothing_of_kvferry_is_loaded_but_the_plugin(request):
    assert request.config.pluginmanager.hasplugin("kvferry")
    assert sorted(name for name in sys.modules if name.startswith("kvferry")) == [
        "kvferry", "kvferry.testing", "kvferry.testing.plugin"
    ]
    assert "numpy" not in sys.modules
    assert "msgspec" not in sys.modules
    assert request.node.user_properties == []
"""


@pytest.fixture
def run(tmp_path):
    """run(text, *options): pytest on a file with this text, in a process and a directory of its own."""

    def start(text, *options):
        (tmp_path / "test_it.py").write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_it.py", *options]
        environment = {**os.environ, "PYTEST_ADDOPTS": ""}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True, timeout=100
        )

    return start


ONE_TEST = ("-k", "64_kib")


def test_an_engine_that_is_not_there_is_skipped_with_its_install_line(run, tmp_path):
    ended = run(ABSENT, *ONE_TEST, "--kvferry-matrix", "out/m.json")
    assert ended.returncode == 0, ended.stdout
    assert "1 skipped" in ended.stdout
    assert "pip install absent" in ended.stdout
    cell = matrix.load(tmp_path / "out/m.json").engines["absent"]["registration"]
    assert (cell.status, cell.skipped) == ("skipped", 1)
    assert "package 'no_such_module' is missing (pip install absent)" in cell.reasons[0]


def test_an_engine_that_is_required_and_not_there_fails(run, tmp_path):
    ended = run(ABSENT, *ONE_TEST, "--kvferry-require", "local", "--kvferry-require", "Absent")
    assert ended.returncode == 1
    assert "required, but not available: engine 'absent' can't be imported" in ended.stdout
    assert run(ABSENT, *ONE_TEST, "--kvferry-require", "local").returncode == 0


def test_the_matrix_has_every_outcome_under_the_group_of_the_test(run, tmp_path):
    chosen = "of_its_own or 64_kib or device_region or without_the_capability_a_fence or not_of"
    ended = run(MIXED, "-k", chosen, "--kvferry-matrix", "m.json", "--kvferry-memory", "memfd")
    assert ended.returncode == 1
    made = matrix.load(tmp_path / "m.json")
    assert list(made.engines) == ["mine"]
    row = made.engines["mine"]
    assert {group: str(cell) for group, cell in row.items()} == {
        "registration": "1 refused, 1 failed",
        "proofs": "1 skipped",
        "own": "1 passed",
    }
    assert row["registration"].reasons == [
        "no DEVICE_MEMORY",
        "test_what_an_engine_says_of_itself_is_bytes_of_at_most_64_kib",
    ]
    assert made.memory == "memfd"
    assert set(made.versions) == {"kvferry", "python", "kernel"}
    assert "registration  1 refused, 1 failed" in ended.stdout
    assert "written to m.json" in ended.stdout


def test_a_group_is_chosen_by_its_name(run, tmp_path):
    assert run(MIXED, "-k", "blobs", "--kvferry-matrix", "m.json").returncode == 0
    row = matrix.load(tmp_path / "m.json").engines["mine"]
    assert {group: str(cell) for group, cell in row.items()} == {"blobs": "6 passed"}


def test_a_failed_comparison_shows_its_values(run):
    ended = run(ABSENT.replace('"absent"\n', '"local"\n') + "    options = {'mechanism': 'no'}\n", "-k", "64_kib")
    assert ended.returncode == 1
    assert "'no'" in ended.stdout


def test_it_does_nothing_to_other_peoples_tests(run):
    ended = run(UNTOUCHED, "--strict-markers", "-W", "error")
    assert ended.returncode == 0, ended.stdout
    assert "kvferry:" not in ended.stdout


def test_memory_of_a_kind_that_is_not_there_is_refused_with_the_reason(run, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('none in this test')")
    ended = run(MIXED, "--kvferry-memory", "cuda")
    assert ended.returncode == 4
    assert "--kvferry-memory cuda: there is no CUDA memory to test with: torch can't be imported" in ended.stderr
    assert "on a machine with a GPU" in ended.stderr
    assert run(MIXED, "--kvferry-memory", "stone").returncode == 4


def test_the_choice_reaches_the_suite(monkeypatch):
    monkeypatch.setattr(settings, "current", settings.Settings())
    _choose(["LOCAL"], "private")
    assert settings.current == settings.Settings(frozenset({"local"}), KINDS["private"])
