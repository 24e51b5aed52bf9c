import pathlib
import runpy

ROOT = pathlib.Path(__file__).parents[2]


def test_the_room_tables_in_the_docs_are_those_of_the_code():
    render = runpy.run_path(str(ROOT / "tools/room_tables.py"))["render"]
    assert (ROOT / "docs/room-tables.md").read_text() == render(), "run make docs"


def test_the_readme_shows_real_output():
    assert "DEMO_OUTPUT" not in (ROOT / "README.md").read_text()
