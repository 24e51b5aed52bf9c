import pathlib
import re
import runpy
import shutil

import pytest

from kvferry.cli.main import main
from kvferry.presets import MODELS, Grid
from kvferry.testing.matrix import Matrix, save

ROOT = pathlib.Path(__file__).parents[2]


def test_the_room_tables_in_the_docs_are_those_of_the_code():
    render = runpy.run_path(str(ROOT / "tools/room_tables.py"))["render"]
    assert (ROOT / "docs/room-tables.md").read_text() == render(), "run make docs"


def test_the_readme_shows_real_output():
    assert "DEMO_OUTPUT" not in (ROOT / "README.md").read_text()


EXPLAIN = (ROOT / "docs/explain.md").read_text()
EXAMPLES = re.findall(r"```console\n\$ kvferry (explain .*)\n([^`]*)```", EXPLAIN)


def lines(text):
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize(("command", "output"), EXAMPLES)
def test_the_examples_of_explain_are_what_it_prints(command, output, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    code = main(command.split())
    captured = capsys.readouterr()
    assert lines(captured.out + captured.err) == lines(output)
    assert code == (1 if "do not fit" in output else 0)


def test_there_are_examples_and_a_picture_of_the_first():
    assert len(EXAMPLES) == 2
    bytes_sent = re.search(r"([0-9,]+) bytes in ([0-9,]+) rows", EXAMPLES[0][1])
    assert f"{bytes_sent[1]} bytes in {bytes_sent[2]} rows" in (ROOT / "docs/explain.svg").read_text()


def test_the_page_on_explain_names_all_models_and_words():
    for model in MODELS.values():
        assert f"| `{model.name}` | {model.layers} |" in EXPLAIN
        assert f"| {model.source} |" in EXPLAIN
    for word in Grid.__struct_fields__:
        assert f"`{word}=" in EXPLAIN, word


def test_the_matrix_of_engines_in_the_docs_is_that_of_the_saved_runs(tmp_path):
    page = ROOT / "docs/engines.md"
    (tmp_path / "page.md").write_text(page.read_text())
    shutil.copytree(ROOT / "docs/matrix", tmp_path / "saved")
    main_of = runpy.run_path(str(ROOT / "tools/engine_matrix.py"))["main"]
    main_of(str(tmp_path / "page.md"), str(tmp_path / "saved"))
    assert (tmp_path / "page.md").read_text() == page.read_text(), "run make matrix"


def test_a_fresh_run_takes_the_place_of_the_saved_one(tmp_path):
    page, saved, fresh = tmp_path / "page.md", tmp_path / "saved", tmp_path / "fresh"
    page.write_text("before\n<!-- matrix -->\nold\n")
    for folder, engine in ((saved, "one"), (fresh, "two")):
        matrix = Matrix()
        matrix.cell(engine, "proofs").add("passed")
        save(matrix, folder / ("verbs-mine.json" if folder is saved else "mine/mine.json"))
    main_of = runpy.run_path(str(ROOT / "tools/engine_matrix.py"))["main"]
    main_of(str(page), str(saved))
    assert "| `one` |" in page.read_text()
    main_of(str(page), str(saved), str(fresh))
    assert "`one`" not in page.read_text()
    assert "| `two` | plain | 1 passed |" in page.read_text()
    assert page.read_text().startswith("before\n<!-- matrix -->\n")
