"""The demo's verdict: each of its comparisons can fail, and then the command does."""

import io
import json
import re

import pytest

from kvferry.cli import main as command
from kvferry.cli.verdict import judge
from kvferry.obs import Event, EventWriter, read_event

GRIDS = ("page=16,order=hnd,arrange=page", "page=16,order=hnd,arrange=page")
FIELDS = [
    "engine", "tokens_equal", "logits_equal", "kv_bytes_equal", "kv_bytes", "transfer_s", "gb_per_s", "memcpy_ratio",
    "ttft_s", "text", "prefill", "decode", "ranks",
]  # fmt: skip
GENERATED = {"tokens": [5, 6], "logits": "abc"}


def prefill_rank(name="prefill", sent_s=7.0, **changed):
    return events(
        name,
        changed,
        computed=(6.0, {"first_token": 5}),
        sent=(sent_s, {}),
        **{"handed over": (7.5, {"sent_s": sent_s, "kv_bytes": 2_000_000_000})},
        stored=(7.6, {"difference": ""}),
        memcpy=(7.7, {"seconds": 0.25, "nbytes": 2_000_000_000}),
        generated=(9.0, GENERATED),
    )


def decode_rank(name="decode", received_s=8.0, nbytes=2_000_000_000, **changed):
    return events(
        name,
        changed,
        received=(received_s, {"kv_bytes": nbytes, "first_token": 5}),
        stored=(8.1, {"difference": ""}),
        compared=(8.2, {"nbytes": nbytes, "difference": ""}),
        generated=(9.0, GENERATED),
    )


def events(source, changed, **kinds):
    """Events by kind; `changed` overrides data of a kind."""
    return {kind: Event(source, kind, at_s, {**data, **changed.get(kind, {})}) for kind, (at_s, data) in kinds.items()}


def verdict(prefill=None, decode=None, grids=GRIDS):
    return judge("local", grids, prefill or [prefill_rank()], decode or [decode_rank()], begun_s=5.0)


def test_equal_bytes_tokens_and_logits_are_a_success_with_its_figures():
    outcome = verdict()
    assert outcome.all_equal
    assert (outcome.kv_bytes, outcome.transfer_s, outcome.ttft_s) == (2_000_000_000, 1.0, 3.0)
    assert (outcome.gb_per_s, outcome.memcpy_ratio) == (2.0, 0.25)


def test_figures_of_several_ranks_are_of_all_of_them():
    prefill = [prefill_rank("prefill tp0", sent_s=7.0), prefill_rank("prefill tp1", sent_s=6.5)]
    decode = [decode_rank(f"decode tp{rank}", 8.0 + rank / 4, 500_000_000) for rank in range(3)]
    outcome = verdict(prefill, decode)
    assert outcome.all_equal
    assert (outcome.kv_bytes, outcome.transfer_s, outcome.ttft_s) == (1_500_000_000, 2.0, 3.5)
    assert outcome.memcpy_ratio == 0.25 * 0.75 / 2.0
    assert outcome.ranks == (2, 3)


WRONG = {
    "another token": ("tokens_equal", {}, {"generated": {"tokens": [5, 7]}}),
    "another first token of a decode rank": ("tokens_equal", {}, {"received": {"first_token": 6}}),
    "another first token of a prefill rank": ("tokens_equal", {"computed": {"first_token": 6}}, {}),
    "other logits": ("logits_equal", {}, {"generated": {"logits": "abd"}}),
    "another byte": ("kv_bytes_equal", {}, {"compared": {"difference": "layer 1 differs"}}),
    "a stray byte": ("kv_bytes_equal", {}, {"stored": {"difference": "1 byte too many"}}),
    "ranks of prefill that differ": ("kv_bytes_equal", {"stored": {"difference": "two ranks differ"}}, {}),
    "a share that was not compared as a whole": ("kv_bytes_equal", {}, {"compared": {"nbytes": 1_999_999_872}}),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("as_json", [False, True])
def test_one_difference_fails_the_command(name, as_json, monkeypatch, capsys):
    field, prefill, decode = WRONG[name]
    outcome = verdict([prefill_rank(**prefill)], [decode_rank(**decode)])
    assert [name for name in ("tokens_equal", "logits_equal", "kv_bytes_equal") if not getattr(outcome, name)] == [
        field
    ]
    monkeypatch.setattr("kvferry.cli.demo.run", lambda *_: outcome)
    assert command.main(["demo", *(["--json"] if as_json else [])]) == 1
    shown = capsys.readouterr()
    assert f'"{field}":false' in shown.out if as_json else "NOT equal" in shown.out
    assert shown.err.startswith("kvferry: ") == (field == "kv_bytes_equal")


def test_a_difference_of_any_rank_counts_and_is_said_with_its_name():
    ranks = [decode_rank("decode tp0"), decode_rank("decode tp1", compared={"difference": "layer 1 differs"})]
    outcome = verdict(decode=ranks)
    assert not outcome.kv_bytes_equal
    assert outcome.differences == ["decode tp1: layer 1 differs"]


def test_an_equal_outcome_ends_with_0(monkeypatch, capsys):
    monkeypatch.setattr("kvferry.cli.demo.run", lambda *_: verdict())
    assert command.main(["demo", "--prompt", "Say\n  hello.", "--engine", "LOCAL"]) == 0
    shown = capsys.readouterr().out
    assert "NOT equal" not in shown
    assert re.search(r"prompt +\d+ tokens: Say hello\.\s", shown)
    assert re.search(r"total +\d+\.\d\d s, with the start of both workers *\n", shown)
    assert not re.search("^(prefill|decode)", shown, re.MULTILINE)


def test_the_summary_shows_grids_that_are_not_the_default(monkeypatch, capsys):
    outcome = verdict([prefill_rank(), prefill_rank()], grids=("tp=2", GRIDS[1]))
    monkeypatch.setattr("kvferry.cli.demo.run", lambda *_: outcome)
    assert command.main(["demo", "--prefill", "tp=2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^prefill +2 ranks: tp=2 *$", shown, re.MULTILINE)
    assert re.search(r"^decode +1 rank: page=16,order=hnd,arrange=page *$", shown, re.MULTILINE)
    assert "with the start of all 3 workers" in shown


def test_the_summary_shows_the_end_of_a_long_prompt(monkeypatch, capsys):
    monkeypatch.setattr("kvferry.cli.demo.run", lambda *_: verdict())
    assert command.main(["demo"]) == 0
    assert re.search(r"tokens: \.\.\..*made\s+the\s+ferry\s+line\s+reliable\.", capsys.readouterr().out)


def test_the_fields_of_json(monkeypatch, capsys):
    monkeypatch.setattr("kvferry.cli.demo.run", lambda *_: verdict(grids=("tp=2", "pp=3")))
    assert command.main(["demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == FIELDS
    assert (found["prefill"], found["decode"], found["ranks"]) == ("tp=2", "pp=3", [1, 1])


def test_events_travel_as_lines_and_other_lines_are_none():
    stream = io.StringIO()
    event = EventWriter("prefill", stream).write("token", token=7)
    assert read_event(stream.getvalue()) == event
    assert stream.getvalue().count("\n") == 1
    assert read_event("Traceback (most recent call last):") is None
    assert read_event('{"source": 1}') is None
