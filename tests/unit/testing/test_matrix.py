"""The matrix of engines and groups: counting, saving, and the tables made of it."""

import subprocess
import sys

import pytest

from kvferry.testing import matrix
from kvferry.testing.matrix import Cell, Matrix


def sample():
    made = Matrix({"kvferry": "1.2", "python": "3.11.9"}, "memfd")
    for outcome in ("passed", "passed", "refused"):
        made.cell("one", "proofs").add(outcome, ["no FENCE"] if outcome == "refused" else [])
    made.cell("one", "fork").add("skipped", ["no fork | here"])
    made.cell("two", "fork").add("failed", ["test_x"])
    return made


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (["passed", "skipped", "refused"], "passed"),
        (["passed", "failed"], "failed"),
        (["refused", "skipped"], "refused"),
        (["skipped"], "skipped"),
        ([], "skipped"),
    ],
)
def test_the_status_of_a_cell_is_the_worst_of_it(outcomes, status):
    cell = Cell()
    for outcome in outcomes:
        cell.add(outcome)
    assert cell.status == status


def test_a_reason_is_kept_once():
    cell = Cell()
    for reasons in (["a"], ["a", "b", "a"]):
        cell.add("skipped", reasons)
    assert (cell.reasons, cell.skipped) == (["a", "b"], 2)


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "new" / "matrix.json"
    matrix.save(sample(), path)
    loaded = matrix.load(path)
    assert matrix.markdown_of([loaded]) == matrix.markdown_of([sample()])
    assert (loaded.memory, loaded.versions) == ("memfd", {"kvferry": "1.2", "python": "3.11.9"})


def test_the_text_has_a_row_for_each_group_and_says_why():
    assert matrix.text_of(sample()) == [
        "        one                  two",
        "proofs  2 passed, 1 refused  -",
        "fork    1 skipped            1 failed",
        "one | proofs | no FENCE",
        "one | fork | no fork | here",
        "two | fork | test_x",
    ]


MARKDOWN = """\
| engine | memory | proofs | fork |
| --- | --- | --- | --- |
| `one` | memfd | 2 passed, 1 refused | 1 skipped |
| `two` | memfd | - | 1 failed |

- `one`, proofs: no FENCE
- `one`, fork: no fork | here
- `two`, fork: test_x

Run with kvferry 1.2, python 3.11.9.
"""


def test_the_command_prints_one_markdown_table_of_all_files(tmp_path):
    path = tmp_path / "matrix.json"
    matrix.save(sample(), path)
    command = [sys.executable, "-m", "kvferry.testing.matrix", str(path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout == MARKDOWN
    twice = subprocess.run([*command, str(path)], check=True, capture_output=True, text=True, timeout=60).stdout
    assert twice.count("| `one` |") == 2
    assert twice.count("no FENCE") == 1


def test_the_command_says_what_is_wrong_with_a_file(tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text('{"engines": 5}')
    assert matrix.main([str(bad)]) == 1
    assert "engines" in capsys.readouterr().err
    assert matrix.main([str(tmp_path / "none.json")]) == 1
    assert matrix.main([]) == 2
    assert "usage" in capsys.readouterr().err
