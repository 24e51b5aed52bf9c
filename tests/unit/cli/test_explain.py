"""`kvferry explain`: figures that can be worked out by hand, refusals in the planner's words, the JSON object."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli import explained
from kvferry.cli.explain import SHOWN_CHOICES, prepare, rank_name, tables
from kvferry.cli.explained import MAX_TOKENS, Ask, explain
from kvferry.cli.main import main
from kvferry.errors import InputError
from kvferry.ids import Rank
from kvferry.layout import Slot, Window, covers, extent, segments, supports
from kvferry.presets import Block, Item, ModelShape, attention, find_model, layouts_of, parse_grid


def ask(model, prefill, decode, tokens=4096, prefix=0, room=0, decode_model=None):
    return prepare(model, decode_model, prefill, decode, tokens, prefix, room)


def found(*args, **rest):
    answer = explain(ask(*args, **rest))
    assert answer.fits, answer.refusal
    return answer


def sent(answer):
    """(prefill tp, decode tp, space) -> bytes."""
    return {(line.prefill.tp, line.decode.tp, line.space): line.bytes for line in answer.lines}


# bytes and rows


def test_mla_from_eight_ranks_to_one_is_sent_once_by_one_of_them():
    answer = found("deepseek-r1", "tp=8", "tp=1", tokens=32768)
    (line,) = answer.lines
    assert answer.bytes == line.bytes == 61 * 1152 * 32768
    assert answer.rows == line.rows == 61 * 32768 // 16, "a row for each layer and page"
    assert [total.bytes for total in answer.sources] == [answer.bytes] + [0] * 7
    (part,) = line.parts
    assert (part.fields, part.layers, part.heads) == (["latent"], [(0, 60)], [])
    assert (line.tokens.words, line.tokens.ranges) == ("all 32,768", [(0, 32767)])


def test_heads_are_merged_at_the_destination_in_a_row_for_each_token():
    answer = found("llama-3.1-70b", "tp=8", "tp=2")
    of_one = 80 * 2 * 128 * 2 * 4096
    assert sent(answer) == {(source, source // 4, "kv"): of_one for source in range(8)}
    assert {line.rows for line in answer.lines} == {80 * 2 * 4096}, "layers x (K, V) x tokens, of one head each"
    assert [line.parts[0].heads for line in answer.lines] == [[(head, head)] for head in range(8)]
    assert [total.bytes for total in answer.destinations] == [4 * of_one] * 2


def test_equal_grids_send_whole_pages():
    answer = found("llama-3.1-8b", "tp=4,page=64", "tp=4,page=64")
    assert {line.rows for line in answer.lines} == {32 * 2 * 4096 // 64}
    assert answer.bytes == 131072 * 4096


def test_with_heads_outside_of_tokens_a_head_of_a_page_is_a_row():
    answer = found("llama-3.1-8b", "tp=4,order=hnd", "tp=2,order=hnd")
    assert {line.rows for line in answer.lines} == {32 * 2 * 4096 // 16}, "both heads of a rank are neighbours there"


def test_windows_move_their_last_tokens_from_the_page_on_that_holds_the_first():
    answer = found("gpt-oss-20b", "tp=8", "tp=8", tokens=1000)
    kv, swa = ([line for line in answer.lines if line.space == space] for space in ("kv", "swa"))
    assert len(kv) == len(swa) == 8
    assert kv[0].bytes == 12 * 2 * 64 * 2 * 1000
    assert (swa[0].tokens.words, swa[0].bytes) == ("864-999", 12 * 2 * 64 * 2 * 136), "872 lies in the page from 864 on"
    assert swa[0].parts[0].layers == [(layer, layer) for layer in range(0, 24, 2)]


def test_state_moves_once_per_request_each_group_by_its_own_heads():
    short, long = (found("qwen3-next-80b-a3b", "tp=8", "tp=4", tokens=tokens) for tokens in (1, 5000))
    states = [line for line in short.lines if line.space == "mamba"]
    assert states == [line for line in long.lines if line.space == "mamba"]
    assert {line.bytes for line in states} == {36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4) // 8}
    assert [(part.fields, part.heads) for part in states[3].parts] == [
        (["conv_k", "conv_q"], [(6, 7)]),
        (["conv_v", "temporal"], [(12, 15)]),
    ]
    assert states[0].tokens.words == "one state"


def test_tokens_below_the_prefix_do_not_move():
    answer = found("deepseek-r1", "tp=1", "tp=1", prefix=1000)
    assert answer.bytes == 61 * 1152 * 3096
    assert answer.lines[0].tokens.words == "1000-4095"


def test_a_prefix_that_is_the_whole_request_leaves_only_state():
    assert found("deepseek-r1", "tp=2", "tp=1", prefix=4096).lines == []
    assert {line.space for line in found("qwen3-next-80b-a3b", "", "", prefix=4096).lines} == {"mamba"}


@pytest.mark.parametrize(
    ("prefill", "decode", "words", "ranges"),
    [
        ("cp=4", "", "1024-2047", [(1024, 2047)]),
        ("cp=4,deal=zigzag", "", "512-1023, 3072-3583", [(512, 1023), (3072, 3583)]),
        ("cp=4,deal=token", "", "1 of every 4 from 1 on", []),
        ("cp=4,deal=page,page=64", "", "64 of every 256 from 64 on", [(at, at + 63) for at in range(64, 4096, 256)]),
        ("cp=4", "dcp=2", "1 of every 2 from 1,024 on", []),
        ("cp=4,deal=zigzag", "dcp=2", "512: part 1, 6 of 8; token 0 mod 2", []),
        ("cp=4,deal=page,page=64", "cp=3,deal=page,page=16", "", None),
    ],
)
def test_shares_of_a_request_are_told_in_words(prefill, decode, words, ranges):
    answer = found("deepseek-r1", prefill, decode)
    line = next(line for line in answer.lines if line.prefill.cp == 1 and line.decode.cp == 0)
    assert answer.bytes == 61 * 1152 * 4096, "every token moves once, whoever has it"
    if ranges is None:
        assert line.tokens.words.endswith(": unit of 64 1 mod 4; unit of 16 0 mod 3")
    else:
        assert (line.tokens.words, line.tokens.ranges) == (words, ranges)
    assert line.bytes == 61 * 1152 * line.tokens.count


def test_many_irregular_runs_where_one_side_has_all_of_them():
    line = found("deepseek-r1", "cp=2,deal=page,page=16", "", tokens=16 * 9 + 8, prefix=8).lines[0]
    assert line.tokens.words == f"{line.tokens.count:,}: unit of 16 0 mod 2; all"


def test_pipeline_stages_and_their_layers():
    answer = found("llama-3.1-70b", "pp=2,stages=30/50", "pp=4")
    layers = [(line.prefill.pp, line.decode.pp, line.parts[0].layers) for line in answer.lines]
    assert layers == [(0, 0, [(0, 19)]), (0, 1, [(20, 29)]), (1, 1, [(30, 39)]), (1, 2, [(40, 59)]), (1, 3, [(60, 79)])]


DEALT = ["", "cp=2", "cp=3,deal=zigzag", "cp=2,deal=page", "cp=2,deal=token", "dcp=3"]
GRIDS = st.builds(
    "pp={},tp={},page={},order={},arrange={},{}".format, st.integers(1, 2), st.integers(1, 5),
    st.sampled_from([1, 4, 16]), st.sampled_from(["nhd", "hnd"]), st.sampled_from(["layer", "block", "page"]),
    st.sampled_from(DEALT),
)  # fmt: skip
MIXED = ModelShape(
    "mixed",
    (
        Block("kv", (0, 2), (Item("k", 4, 3), Item("v", 4, 3))),
        Block("swa", (1,), (Item("k", 4, 3), Item("v", 4, 3)), Window(50)),
        Block("mamba", (3,), (Item("conv_x", 6, 4), Item("conv_b", 6, 2)), Slot(), "request"),
    ),
)


@settings(max_examples=25, deadline=None)
@given(GRIDS, GRIDS, st.integers(1, 300), st.integers(0, 100), st.integers(0, 7))
def test_every_decode_rank_gets_all_that_it_holds_of_the_request_once(prefill, decode, tokens, percent, room):
    """In bytes, worked out from its own layout alone."""
    prefix = tokens * percent // 100
    here, there = parse_grid(prefill), parse_grid(decode)
    answer = explain(Ask(MIXED, MIXED, here, there, tokens, prefix, room))
    assert answer.fits, answer.refusal
    for layout, total in zip(layouts_of(MIXED, there, 1), answer.destinations, strict=True):
        spaces = {space.name: space for space in layout.spaces}
        wanted = 0
        for tensor in layout.tensors:
            space = spaces[tensor.space]
            lo = extent(space, prefix, tokens)[0]
            if isinstance(space.coverage, Window):  # both sides floor to pages of their own
                lo = max(lo, prefix, (tokens - 50) // here.page * here.page)
            held = 1 if isinstance(space.coverage, Slot) else segments(space, lo, tokens, tokens).length.sum()
            wanted += tensor.item_bytes // space.page_tokens * len(tensor.layers) * int(held)
        assert (total.rank, total.bytes) == (layout.rank, wanted)
    for line in answer.lines:
        elements = sum(_count(part.layers) * _count(part.heads) for part in line.parts for _ in part.fields)
        assert line.bytes == elements * (6 * 2 if line.space == "mamba" else 4 * 2 * line.tokens.count)


def _count(spans):
    return sum(last - first + 1 for first, last in spans)


# replicas, rooms


def test_another_room_elects_another_replica():
    first, second = (found("deepseek-r1", "tp=4", "", room=room) for room in (0, 1))
    assert [line.prefill.tp for line in (*first.lines, *second.lines)] == [0, 1]
    (choice,) = second.choices
    assert choice.elected == Rank(tp=1)
    assert choice.others == [Rank(tp=0), Rank(tp=2), Rank(tp=3)]
    assert choice.spared == []


def test_replicas_that_other_decode_ranks_turn_to_are_named_so():
    answer = found("deepseek-r1", "tp=4", "tp=4")
    assert [(line.prefill.tp, line.decode.tp) for line in answer.lines] == [(rank, rank) for rank in range(4)]
    assert answer.choices[1].spared == [Rank(tp=0), Rank(tp=2), Rank(tp=3)]
    assert answer.choices[1].others == []


def test_what_nobody_else_holds_is_no_choice():
    assert found("llama-3.1-8b", "tp=8", "tp=2").choices == []


def test_more_ranks_than_heads_are_replicas_of_each_other():
    answer = found("qwen3-235b-a22b", "tp=8", "tp=1")
    assert len(answer.choices) == 4
    assert [line.prefill.tp for line in answer.lines] == [0, 2, 4, 6]


def test_fields_are_elected_on_their_own():
    """Of 32 ranks each has one of 32 value heads for itself, and one of 16 query heads together with another."""
    answer = found("qwen3-next-80b-a3b", "tp=32", "tp=16")
    states = [line for line in answer.lines if (line.decode.tp, line.space) == (3, "mamba")]
    parts = [(line.prefill.tp, [(part.fields, part.heads) for part in line.parts]) for line in states]
    assert parts == [
        (6, [(["conv_k", "conv_q"], [(3, 3)]), (["conv_v", "temporal"], [(6, 6)])]),
        (7, [(["conv_v", "temporal"], [(7, 7)])]),
    ]
    assert answer.bytes == found("qwen3-next-80b-a3b", "tp=16", "tp=16").bytes
    (choice,) = (each for each in answer.choices if (each.decode.tp, each.space) == (3, "mamba"))
    assert (sorted(choice.fields), choice.elected, choice.others) == (["conv_k", "conv_q"], Rank(tp=6), [Rank(tp=7)])


# refusals: in the words of the layouts


def refusal(*args, **rest):
    answer = explain(ask(*args, **rest))
    assert not answer.fits
    assert answer.lines == []
    return answer.refusal


def both(model, prefill, decode, decode_model=None):
    return layouts_of(find_model(model), parse_grid(prefill), 4), layouts_of(
        find_model(decode_model or model), parse_grid(decode), 4
    )


def test_unequal_models_do_not_fit():
    (source, *_), (target,) = both("deepseek-r1", "tp=8", "", "deepseek-v3")
    text = refusal("deepseek-r1", "tp=8", "", decode_model="deepseek-v3")
    assert text == f"prefill dp0 pp0 cp0 tp0 to decode dp0 pp0 cp0 tp0: {supports(source, target).reason}"
    assert "model: prefill has 'deepseek-r1', decode has 'deepseek-v3'" in text


def test_unequal_dtypes_do_not_fit():
    text = refusal("llama-3.1-8b", "tp=2", "tp=2,dtype=float8_e4m3fn")
    assert "dtype: prefill has 'bfloat16', decode has 'float8_e4m3fn'; use the same model and dtype on both" in text


def layers(name, count, per="token"):
    items = (Item("k", 4, 2), Item("v", 4, 2))
    scale = (Block("kv", tuple(range(count)), (Item("scale", 1, 2),), per="page"),) if per == "page" else ()
    return ModelShape(name, (Block("kv", tuple(range(count)), items), *scale))


def test_layers_that_prefill_lacks_do_not_fit():
    here, there = layers("m", 3), layers("m", 5)
    grid = parse_grid("tp=2")
    text = explain(Ask(here, there, grid, grid, 100)).refusal
    target = layouts_of(there, grid, 4)[0]
    assert text == f"decode dp0 pp0 cp0 tp0: {covers(layouts_of(here, grid, 4), target)}"
    assert "(layers 3-4)" in text


def test_granules_that_differ_do_not_fit():
    model = layers("m", 2, per="page")
    text = explain(Ask(model, model, parse_grid("page=16"), parse_grid("page=32"), 100)).refusal
    assert "granule_tokens of field 'scale' in space 'kv', layer 0: prefill has 16, decode has 32" in text


def test_a_draft_layer_that_prefill_lacks_stays_as_it_is():
    answer = found("deepseek-r1", "tp=2", "draft=1")
    assert answer.unsent == {"kv": [(61, 61)]}
    assert answer.bytes == 61 * 1152 * 4096
    assert found("deepseek-r1", "tp=2,draft=1", "draft=1").bytes == 62 * 1152 * 4096


# bounds


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ({"tokens": 0}, f"--tokens 0 is not within 1 and {MAX_TOKENS}"),
        ({"tokens": MAX_TOKENS + 1}, "--tokens 1048577 is not within 1"),
        ({"prefix": -1}, "--prefix -1 is not within 0 and --tokens 4096"),
        ({"prefix": 4097}, r"--prefix 4097 is not within 0 and --tokens 4096 \(the prefix is what decode already has"),
        ({"room": -1}, r"--room -1 is not within 0 and 2\*\*64 - 1"),
        ({"prefill": "tp=33", "decode": "tp=32"}, "--prefill has 33 ranks and --decode 32 in a DP group: 1056 pairs"),
        ({"prefill": "pp=33"}, "--prefill: pp=33 stages for 32 layers"),
        ({"decode": "dtype=fp8"}, r"--decode: unknown cache dtype 'fp8' \(use one of"),
        ({"decode": "draft=1"}, "--decode: draft=1: llama-3.1-8b has no draft layers"),
        ({"decode": "tpp=1"}, r"--decode: 'tpp=1': 'tpp=1' is not known \(did you mean tp\?\)"),
        ({"prefill": "tp=0"}, "--prefill: tp=0 is below 1"),
        ({"decode_model": "lama"}, "unknown model 'lama'"),
    ],
)
def test_numbers_out_of_bounds_are_refused_with_the_option_that_they_came_by(rest, words):
    with pytest.raises(InputError, match=words):
        explain(ask("llama-3.1-8b", **{"prefill": "", "decode": "", **rest}))


def test_a_prefix_inside_of_a_granule_is_bad_input():
    model = layers("m", 2, per="page")
    with pytest.raises(InputError, match="token 5 is inside a granule of 16"):
        explain(Ask(model, model, parse_grid(""), parse_grid(""), 100, 5))


def test_the_longest_request_is_planned_piece_by_piece(monkeypatch):
    """A million tokens in pages of one, 160 rows each: no array has as many rows as that."""
    sizes = []
    plain = explained.RowCounter.count

    def counted(counter, route, space):
        count = plain(counter, route, space)
        sizes.append(count)
        return count

    monkeypatch.setattr(explained.RowCounter, "count", counted)
    answer = found("smollm2-135m", "tp=3,page=1", "page=64", tokens=MAX_TOKENS)
    assert answer.rows == 3 * 60 * MAX_TOKENS
    assert sizes[0] is sizes[1] is sizes[2], "ranks that differ in addresses only are planned once"


# what is printed


def shown(capsys, *words, code=0):
    assert main(["explain", *words]) == code
    captured = capsys.readouterr()
    return " ".join(captured.out.split()), captured.err


def test_the_tables_have_a_line_for_each_pair_and_the_totals_of_both_sides(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, err = shown(
        capsys, "--model", "llama-3.1-70b", "--prefill", "tp=2,pp=2", "--decode", "tp=4", "--tokens", "100"
    )
    assert err == ""
    assert "llama-3.1-70b, a request of 100 tokens: 32,768,000 bytes in" in out
    assert "from 4 prefill ranks to 4 decode ranks, room 0" in out
    assert "pp1 tp1 tp3 kv 40-79 6-7 all 100 4,096,000 " in out
    assert "prefill rank sends bytes rows decode rank gets bytes rows" in out
    assert "pp0 tp0 8,192,000 " in out
    assert "pools of twice the request's size" in out


def test_what_is_to_be_known_of_replicas_draft_layers_and_groups_is_said(capsys):
    out, _ = shown(
        capsys, "--model", "deepseek-r1", "--prefill", "tp=8", "--decode", "tp=2,dp=2,draft=1", "--tokens", "1",
        "--prefix", "0", "--room", "6",
    )  # fmt: skip
    assert "a request of 1 token: " in out
    assert (
        "kv (latent) for decode tp0: 8 prefill ranks hold the same; room 6 elects tp2, another room may elect tp0, "
        "tp1, tp3; tp4, tp5, tp6, tp7 serve other decode ranks"
    ) in out
    assert "space kv, optional layers 61: no prefill rank holds them, they stay as they are" in out
    assert "decode has 2 DP groups; a request is served by one of them" in out


def test_of_many_choices_some_are_printed(capsys):
    out, _ = shown(capsys, "--model", "deepseek-r1", "--prefill", "tp=16", "--decode", "tp=16", "--prefix", "1000")
    assert "a request of 8,192 tokens, 1,000 of them at the decode side already: " in out
    assert out.count("prefill ranks hold the same") == SHOWN_CHOICES
    assert "... and 4 more such choices, see --json" in out
    assert "tp0, tp1, ... tp15 serve other decode ranks" in out


def test_one_spared_replica_serves_and_several_serve():
    answer = ask("deepseek-r1", "tp=2", "tp=2")
    notes = [text for text in tables(explain(answer), answer) if isinstance(text, str)]
    assert any(text.endswith("room 0 elects tp0; tp1 serves other decode ranks") for text in notes)


def test_a_rank_is_named_by_the_axes_that_its_side_has():
    assert rank_name(Rank(0, 1, 2, 3), parse_grid("pp=2,cp=4,tp=8")) == "pp1 cp2 tp3"
    assert rank_name(Rank(0, 0, 1, 0), parse_grid("dcp=2")) == "cp1"
    assert rank_name(Rank(), parse_grid("")) == "rank 0"


def test_without_a_terminal_the_tables_are_as_wide_as_they_need(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["explain", "--model", "qwen3-next-80b-a3b", "--prefill", "tp=2", "--decode", "tp=4"]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) > 100


@pytest.mark.parametrize("model", ["deepseek-r1", "qwen3-next-80b-a3b", "gpt-oss-20b"])
def test_no_number_is_cut_in_eighty_columns(capsys, monkeypatch, model):
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--tokens", "131072", "--prefill", "tp=4,pp=2,cp=2,deal=zigzag", "--decode", "tp=2,page=64"]
    assert main(["explain", "--model", model, *words]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert max(len(line) for line in out.splitlines()) <= 80
    answer = explain(ask(model, words[3], words[5], tokens=131072))
    shown = set(re.findall(r"[0-9,]*[0-9]", out))
    for each in (*answer.lines, *answer.sources, *answer.destinations):
        assert {f"{each.bytes:,}", f"{each.rows:,}"} <= shown


KEYS = {
    "model", "decode_model", "tokens", "prefix", "room", "prefill", "decode", "fits", "refusal", "lines", "sources",
    "destinations", "bytes", "rows", "choices", "unsent",
}  # fmt: skip


def test_the_json_object_holds_the_request_and_all_that_was_found(capsys):
    assert main(["explain", "--model", "gpt-oss-20b", "--prefill", "tp=2", "--decode", "tp=4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == KEYS
    assert (answer["fits"], answer["refusal"], answer["model"]) == (True, "", "gpt-oss-20b")
    assert (answer["prefill"]["tp"], answer["decode"]["page"], answer["tokens"]) == (2, 16, 8192)
    line = answer["lines"][0]
    assert line["prefill"] == {"dp": 0, "pp": 0, "cp": 0, "tp": 0}
    assert line["parts"][0]["heads"] == [[0, 1]]
    assert line["tokens"] == {
        "count": 8192, "runs": 1, "ranges": [[0, 8191]], "hull": [[0, 8191]], "words": "all 8,192"
    }  # fmt: skip
    assert answer["bytes"] == sum(line["bytes"] for line in answer["lines"])
    assert answer["bytes"] == sum(total["bytes"] for total in answer["sources"])


def test_a_refusal_is_a_finding_in_words_and_as_json(capsys):
    words = ["--model", "deepseek-r1", "--decode-model", "deepseek-v3"]
    out, err = shown(capsys, *words, code=1)
    assert out == ""
    assert err.startswith(
        "kvferry: these two sides do not fit: prefill dp0 pp0 cp0 tp0 to decode dp0 pp0 cp0 tp0: model"
    )
    assert main(["explain", *words, "--json"]) == 1
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert (answer["fits"], answer["lines"]) == (False, [])
    assert answer["refusal"] in captured.err


def test_attention_shapes_of_ones_own_are_explained_too():
    model = attention("own", layers=2, kv_heads=9, head_dim=8, dtype="float16")
    answer = explain(Ask(model, model, parse_grid("tp=4"), parse_grid("tp=2"), 10))
    assert [line.parts[0].heads for line in answer.lines] == [[(0, 1)], [(2, 3)], [(4, 5)], [(6, 8)]]
    assert answer.bytes == 2 * 2 * 9 * 8 * 2 * 10
