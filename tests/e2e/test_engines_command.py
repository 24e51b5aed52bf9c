"""`kvferry engines`: what it lists, what it tries for real, and that nothing it finds makes it fail."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvferry.cli import engines as view
from kvferry.cli.main import main
from kvferry.engines import child, find
from kvferry.engines.findings import Finding
from kvferry.engines.local import LocalEngine, tryout

KEYS = {"name", "origin", "target", "usable", "reason", "hint", "capabilities", "limits", "tryout"}
TRIED = ["shm", "cma", "tcp", "private_page_bytes", "memfd_page_bytes", "ptrace_scope", "memlock_bytes", "open_files"]
CAP_SYS_PTRACE = 19


class Odd(LocalEngine):
    """An engine of somebody else: it can do nothing special, and its try-out is broken."""

    name = "odd"

    def __init__(self):
        super().__init__()
        self.caps = type(self.caps)(0)

    def tryout(self):
        raise ZeroDivisionError("odd")


class Silent(Odd):
    tryout = None


@pytest.fixture
def others(monkeypatch):
    """Registered engines: an odd one, one without a try-out, one that can't be imported."""
    monkeypatch.setattr(find, "_registered", {})
    monkeypatch.setitem(sys.modules, "odd_engines", sys.modules[__name__])
    find.register("odd", "odd_engines:Odd")
    find.register("silent", "odd_engines:Silent")
    find.register("missing", "no_such_package.at_all:Engine", "pip install no-such-package")
    monkeypatch.setattr(LocalEngine, "tryout", lambda _: [Finding("fact", None, "it is so", 7)])


def command(*prefix, environment=()):
    """The engines and the local engine's findings by key, as a process of the command prints them."""
    ended = subprocess.run(
        [*prefix, sys.executable, "-m", "kvferry", "engines", "--json"], capture_output=True, text=True, timeout=100,
        check=False, env={**os.environ, **dict(environment)},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    engines = {engine["name"]: engine for engine in json.loads(ended.stdout)["engines"]}
    return engines, {finding["key"]: finding for finding in engines["local"]["tryout"]}


def test_every_known_engine_is_listed_with_stable_keys_and_the_local_ones_mechanisms_were_tried():
    engines, found = command()
    assert set(engines) >= {"local", "nixl", "mooncake", "mori"}
    assert all(set(engine) == KEYS for engine in engines.values())
    local = engines["local"]
    assert (local["origin"], local["usable"], local["reason"]) == ("built in", True, "")
    assert set(local["capabilities"]) >= {"fence", "grants", "blocking"}
    assert local["limits"] == {"rows": 16384, "bytes": 16 << 20}
    assert list(found) == TRIED
    assert found["tcp"]["works"] is True
    assert found["shm"]["works"] is True
    assert found["private_page_bytes"]["value"] in {4096, 2 << 20}
    assert found["open_files"]["value"] is None or found["open_files"]["value"] > 0
    lacking = [engine for engine in engines.values() if not engine["usable"]]
    assert all(engine["reason"] and engine["hint"] for engine in lacking)


def can_lose_ptrace_rights():
    status = Path("/proc/self/status").read_text()
    return bool(int(status.split("CapEff:")[1].split()[0], 16) >> CAP_SYS_PTRACE & 1)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is missing")
@pytest.mark.skipif(not can_lose_ptrace_rights(), reason="no CAP_SYS_PTRACE here that could be taken away")
def test_rights_that_both_processes_lack_are_no_obstacle_between_them():
    """Both have the same rights then, and the kernel asks for no more than that."""
    _, found = command("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
    assert [found[key]["works"] for key in ("shm", "cma", "tcp")] == [True, True, True]


LIMIT = 'ulimit -f 0; ulimit -l 0; exec "$@"'


def test_what_does_not_work_is_shown_with_its_reason_and_the_exit_code_is_0():
    _, found = command("sh", "-c", LIMIT, "sh", environment={"PYTHONDONTWRITEBYTECODE": "1"}.items())
    assert found["shm"]["works"] is False
    assert "EFBIG" in found["shm"]["text"]
    assert "ulimit -f" in found["shm"]["text"]
    assert found["memfd_page_bytes"]["works"] is False
    assert [found[key]["works"] for key in ("cma", "tcp")] == [True, True]
    assert found["memlock_bytes"]["value"] == 0


def test_for_people_it_is_a_table_of_engines_and_one_of_what_was_tried(others, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["engines"]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert any(line.startswith("local built in yes fence, grants") for line in lines), shown
    assert any(
        line.startswith("odd registered yes nothing beyond the nine calls; at most 16384 rows") for line in lines
    )
    assert any("missing registered no" in line and "pip install no-such-package" in line for line in lines)
    assert "fact it is so" in lines
    assert "tryout no it failed: ZeroDivisionError: odd" in lines
    assert "silent on this host" not in shown


def test_engines_of_others_are_listed_by_the_same_rules(others):
    views = {one.name: one for one in view.look()}
    assert views["silent"].usable
    assert views["silent"].tryout == []
    assert views["odd"].tryout == [Finding("tryout", False, "it failed: ZeroDivisionError: odd")]
    assert (views["missing"].usable, views["missing"].hint) == (False, "pip install no-such-package")
    assert "no_such_package" in views["missing"].reason
    assert json.loads(view.as_json(list(views.values())))["engines"][0].keys() == KEYS


# the try-out of the local engine


def test_a_child_that_does_not_start_is_a_reason(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    found = tryout.tryout()
    assert [finding.key for finding in found] == TRIED
    assert all(finding.works is False and "could not be tried" in finding.text for finding in found[:3])


def test_a_child_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(child, "ANSWER_S", 0.05)
    assert "said nothing" in tryout.tryout()[0].text


def test_bytes_that_do_not_arrive_are_found(monkeypatch):
    hear = child.Child.hear

    def spoilt(process):
        answer = hear(process)
        return {"bytes": "00"} if "bytes" in answer else answer

    monkeypatch.setattr(child.Child, "hear", spoilt)
    assert all("not those that arrived" in finding.text for finding in tryout.tryout()[:3])


@pytest.mark.parametrize(
    ("text", "value", "words"),
    [
        ("0\n", 0, "others of its user"),
        ("1\n", 1, "ancestors only"),
        ("3\n", 3, "cma can't work"),
        ("9\n", 9, "unknown"),
    ],
)
def test_yama_is_explained(text, value, words, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    found = tryout._ptrace_scope()
    assert found.value == value
    assert words in found.text


def test_findings_are_plain_records():
    assert msgspec.json.decode(msgspec.json.encode(Finding("a", True, "b")), type=Finding) == Finding("a", True, "b")
