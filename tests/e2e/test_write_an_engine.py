"""docs/write-an-engine.md as a third party would follow it: its files in a directory of their own, its command."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from kvferry.engines.seam import Caps
from kvferry.testing import matrix
from kvferry.testing.suite import GROUPS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs/write-an-engine.md").read_text()


def run(command, directory):
    """The page's command, with this Python."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        words, cwd=directory, env=environment, check=False, capture_output=True, text=True, timeout=110
    )


def test_the_toy_engine_passes_the_suite_as_the_page_says(tmp_path):
    shutil.copy(EXAMPLES / "toy_engine.py", tmp_path)
    test_file = next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "EngineSuite" in text)
    (tmp_path / "test_toy_engine.py").write_text(test_file)
    command = re.search(r"```console\n\$ (python -m pytest .*)\n```", PAGE)[1]
    ended = run(command, tmp_path)
    assert ended.returncode == 0, ended.stdout[-4000:]
    row = matrix.load(tmp_path / "toy.json").engines["toy"]
    assert list(row) == list(GROUPS)
    assert {cell.status for cell in row.values()} == {"passed"}
    assert row["registration"].reasons[0] == "no DEVICE_MEMORY"
    table = run(re.search(r"`(python -m kvferry.testing.matrix .*?)`", PAGE)[1], tmp_path)
    assert table.stdout.startswith("| engine | memory | registration |")
    assert "| `toy` | plain | " in table.stdout


def test_the_page_shows_the_test_file_and_the_entry_point_as_they_are():
    assert (EXAMPLES / "test_toy_engine.py").read_text() in PAGE
    assert 'toy = "toy_engine:ToyEngine"' in PAGE
    assert len((EXAMPLES / "test_toy_engine.py").read_text().splitlines()) < 15


def test_the_page_names_every_capability_and_every_group():
    for capability in Caps:
        assert f"| `{capability.name}` |" in PAGE, capability
    assert re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.MULTILINE) == list(GROUPS)
    for line in re.findall(r"^    (?:name|caps|limits) = [^#\n]*", PAGE, re.MULTILINE):
        assert line.rstrip() in (EXAMPLES / "toy_engine.py").read_text()


def test_an_engine_of_a_package_is_found_by_its_entry_point(tmp_path):
    shutil.copy(EXAMPLES / "toy_engine.py", tmp_path)
    info = tmp_path / "toy_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    declared = re.search(r'\[project.entry-points."(kvferry.engines)"\]\n(toy = )"(.*)"', PAGE)
    (info / "entry_points.txt").write_text(f"[{declared[1]}]\n{declared[2]}{declared[3]}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "kvferry", "engines"]
    listed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert "toy" in listed.stdout
    assert "NEEDS_TARGET_POLL" in listed.stdout.upper().replace(" ", "_")
