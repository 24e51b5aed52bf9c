"""The demo's live view has a row for each rank."""

import pytest
from rich.console import Console

from kvferry.cli.demo import LiveView, Plan, print_stage
from kvferry.obs import Event
from kvferry.serve.rank import Request, Start


class Letters:
    """A tokenizer of one letter per token."""

    def decode(self, tokens):
        return "".join(chr(token) for token in tokens)


@pytest.fixture
def view():
    start = Start(None, "local", 3, 7, prefill="tp=2,pp=2", decode="page=32")
    return LiveView(Plan(start, (1, 2, 1, 3, 4), Request(1, 2, 3, 4), Letters(), "a prompt"))


def shown(view):
    console = Console(width=100)
    with console.capture() as captured:
        console.print(view.render())
    return [line.split(maxsplit=1) for line in captured.get().splitlines()]


def test_every_rank_has_a_row_and_begins_with_starting(view):
    assert [line.rstrip() for line in map("  ".join, shown(view))][:5] == [
        "prefill  pp0 tp0  starting", "prefill  pp0 tp1  starting", "prefill  pp1 tp0  starting",
        "prefill  pp1 tp1  starting", "decode  starting",
    ]  # fmt: skip


def test_stages_tokens_and_bytes_of_all_ranks_are_shown(view):
    for source, kind, data in (
        ("prefill pp1 tp0", "stage", {"text": "computing 3 tokens"}),
        ("prefill pp0 tp1", "done", {}),
        ("decode", "received", {"kv_bytes": 1500}),
        ("decode", "token", {"token": 72}),
        ("decode", "token", {"token": 105}),
    ):
        view.take(Event(source, kind, 1.0, data))
    text = "\n".join(" ".join(" ".join(line).split()) for line in shown(view))
    assert "prefill pp0 tp1 done\nprefill pp1 tp0 computing 3 tokens\n" in text
    assert "decode starting 2 of 4 tokens\n" in text
    assert "handed over 1,500 bytes of KV cache\n" in text
    assert "text Hi" in text


def test_without_a_terminal_each_stage_is_a_line_with_the_ranks_name(capsys):
    print_stage(Event("prefill tp1", "stage", 1.0, {"text": "computing 3 tokens"}))
    print_stage(Event("prefill tp1", "computed", 1.0, {"first_token": 5}))
    print_stage(Event("prefill tp1", "done", 1.0))
    assert capsys.readouterr().err == "prefill tp1: computing 3 tokens\nprefill tp1: done\n"
