"""The demo's verdict: each of the three comparisons can fail, and then the command does."""

import io
import re

import pytest

from kvferry.cli import main as command
from kvferry.cli.run_demo import Demo, Outcome, Worker
from kvferry.obs import Event, EventWriter, read_event
from kvferry.serve.worker import Request, Start

START = Start(None, "local", "", 64, 0)
REQUEST = Request(room=1, tag=2, num_tokens=3, max_new_tokens=4)
SAME = {"tokens": [5, 6], "logits": "abc", "digests": {"0/0/0": "11", "0/1/0": "22"}}


def verdict(**decode):
    told = {**SAME, **decode}
    demo = Demo(START, REQUEST, show=lambda event: None)
    for side, facts in (("prefill", SAME), ("decode", told)):
        worker = demo._workers[side] = Worker(side, None)
        for kind, at_s, data in (
            ("generated", 9.0, {"tokens": facts["tokens"], "logits": facts["logits"]}),
            ("digests", 8.0, {"digests": facts["digests"]}),
            ("handed over", 7.5, {"sent_s": 7.0, "memcpy_s": 0.25, "kv_bytes": 2_000_000_000}),
            ("received", 8.0, {"kv_bytes": 2_000_000_000}),
        ):
            worker.events[kind] = Event(side, kind, at_s, data)
    return demo._verdict(begun_s=5.0)


def test_equal_bytes_tokens_and_logits_are_a_success_with_its_figures():
    outcome = verdict()
    assert outcome.all_equal
    assert (outcome.kv_bytes, outcome.transfer_s, outcome.ttft_s) == (2_000_000_000, 1.0, 3.0)
    assert (outcome.gb_per_s, outcome.memcpy_ratio) == (2.0, 0.25)


@pytest.mark.parametrize(
    ("field", "decode"),
    [
        ("tokens_equal", {"tokens": [5, 7]}),
        ("logits_equal", {"logits": "abd"}),
        ("kv_bytes_equal", {"digests": {"0/0/0": "11", "0/1/0": "23"}}),
        ("kv_bytes_equal", {"digests": {"0/0/0": "22", "0/1/0": "11"}}),  # two pages exchanged
        ("kv_bytes_equal", {"digests": {"0/0/0": "11"}}),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_one_difference_fails_the_command(field, decode, as_json, monkeypatch, capsys):
    outcome = verdict(**decode)
    assert [name for name in ("tokens_equal", "logits_equal", "kv_bytes_equal") if not getattr(outcome, name)] == [
        field
    ]
    monkeypatch.setattr("kvferry.cli.demo.run", lambda *_: outcome)
    assert command.main(["demo", *(["--json"] if as_json else [])]) == 1
    shown = capsys.readouterr().out
    assert f'"{field}":false' in shown if as_json else "NOT equal" in shown


def test_an_equal_outcome_ends_with_0(monkeypatch, capsys):
    monkeypatch.setattr("kvferry.cli.demo.run", lambda *_: verdict())
    assert command.main(["demo", "--prompt", "Say\n  hello.", "--engine", "LOCAL"]) == 0
    shown = capsys.readouterr().out
    assert "NOT equal" not in shown
    assert re.search(r"prompt +\d+ tokens: Say hello\.\s", shown)
    assert re.search(r"total +\d+\.\d\d s", shown)


def test_the_summary_shows_the_end_of_a_long_prompt(monkeypatch, capsys):
    monkeypatch.setattr("kvferry.cli.demo.run", lambda *_: verdict())
    assert command.main(["demo"]) == 0
    assert re.search(r"tokens: \.\.\..*made\s+the\s+ferry\s+line\s+reliable\.", capsys.readouterr().out)


def test_the_outcome_has_the_fields_of_json():
    assert list(Outcome.__dataclass_fields__) == [
        "engine", "tokens_equal", "logits_equal", "kv_bytes_equal", "kv_bytes", "transfer_s", "gb_per_s",
        "memcpy_ratio", "ttft_s", "text",
    ]  # fmt: skip


def test_events_travel_as_lines_and_other_lines_are_none():
    stream = io.StringIO()
    event = EventWriter("prefill", stream).write("token", token=7)
    assert read_event(stream.getvalue()) == event
    assert stream.getvalue().count("\n") == 1
    assert read_event("Traceback (most recent call last):") is None
    assert read_event('{"source": 1}') is None
