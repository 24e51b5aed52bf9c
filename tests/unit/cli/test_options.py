"""Each option says what it does; the environment may choose the engine; figures are in good English."""

import pytest

from kvferry.cli.main import app, main
from kvferry.cli.words import count


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("demo", {"--prompt", "--file", "--model", "--engine", "--max-new-tokens", "--prefill", "--decode", "--json"}),
        ("bootstrap", {"--host", "--port", "--insecure"}),
        ("engines", {"--json"}),
        (
            "explain",
            {"--model", "--tokens", "--prefill", "--decode", "--decode-model", "--prefix", "--room", "--svg", "--json"},
        ),
        ("simulate", {"--rooms", "--seed", "--json"}),
    ],
)
def test_every_option_has_a_help_text(command, names):
    found = app[command].assemble_argument_collection(parse_docstring=True)
    options = {option.name: option.parameter.help for option in found}
    assert set(options) == names
    assert all(options.values()), options


def test_the_help_page_shows_these_texts(capsys):
    main(["simulate", "--help"])
    assert "Seed of the first world" in " ".join(capsys.readouterr().out.split())


def test_the_environment_names_the_default_engine(monkeypatch, capsys):
    monkeypatch.setenv("KVFERRY_ENGINE", "absent")
    assert main(["demo"]) != 0
    assert "no engine is called 'absent'" in capsys.readouterr().err


def test_an_option_goes_before_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("KVFERRY_ENGINE", "mooncake")
    assert main(["demo", "--engine", "local", "--max-new-tokens", "0"]) == 2
    assert "is below 1" in capsys.readouterr().err


def test_one_is_singular_and_anything_else_is_plural(capsys):
    assert (count(0, "kill"), count(1, "kill"), count(2, "kill")) == ("0 kills", "1 kill", "2 kills")
    assert main(["simulate", "--rooms", "1"]) == 0
    assert capsys.readouterr().out.startswith("1 room in 1 world: 0 violations, ")
