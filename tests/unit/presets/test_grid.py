"""Grids in words: what they mean, what they refuse, and that any two of them fit together."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import InputError, LayoutError
from kvferry.ids import Rank
from kvferry.layout import Cyclic, Ranges, Rows, Slot, Space, Window, covers, supports, validate
from kvferry.presets import MODELS, Block, Grid, Item, ModelShape, attention, layout_of, layouts_of, parse_grid
from kvferry.presets.grid import deal_of, head_interval, stage_layers

SMALL = attention("small", layers=5, kv_heads=3, head_dim=4)
STATE = ModelShape(
    "state",
    (
        Block("kv", (0, 2), (Item("k", 4, 2), Item("v", 4, 2))),
        Block("kv", (0, 2), (Item("scale", 1, 2, "float32"),), per="page"),
        Block("swa", (1, 3), (Item("k", 4, 2), Item("v", 4, 2)), Window(9)),
        Block("mamba", (4, 5), (Item("conv_x", 6, 4), Item("conv_b", 6, 2)), Slot(), "request"),
        Block("row", (4,), (Item("row", 7),), Rows(), "token"),
        Block("kv", (6,), (Item("k", 4, 2), Item("v", 4, 2)), optional=True),
    ),
)
"""Everything that a block can be."""


# words


def test_an_empty_text_is_one_rank():
    assert parse_grid("") == parse_grid(" , ") == Grid()
    assert Grid().ranks() == [Rank()]


def test_every_key_has_a_meaning_and_capitals_and_blanks_have_none():
    text = "dp=2, PP=2,cp=2,tp=4,page=64,order=HND,arrange=block,deal=zigzag,stages=1/4,dtype=int8,draft=1"
    grid = parse_grid(text)
    assert grid == Grid(
        dp=2, pp=2, cp=2, tp=4, page=64, order="hnd", arrange="block", deal="zigzag", stages="1/4", dtype="int8",
        draft=True,
    )  # fmt: skip
    assert grid.size == 16
    assert grid.ranks(1)[-1] == Rank(1, 1, 1, 3)
    assert len(set(grid.ranks())) == 16


def test_ranks_of_a_group_come_stage_by_stage_and_tp_runs_fastest():
    ranks = parse_grid("pp=2,dcp=2,tp=2,dp=3").ranks(2)
    assert ranks[:5] == [Rank(2, 0, 0, 0), Rank(2, 0, 0, 1), Rank(2, 0, 1, 0), Rank(2, 0, 1, 1), Rank(2, 1, 0, 0)]


WRONG = {
    "tpp=4": r"'tpp=4' is not known \(did you mean tp\?\)",
    "zzzz=4": r"'zzzz=4' is not known \(name=value of dp, pp, .*cache\)",
    "tp": r"'tp': tp has no value \(write tp=value\)",
    "tp=": "tp= is not a whole number",
    "tp=four": "tp=four is not a whole number",
    "tp=1.5": "tp=1.5 is not a whole number",
    "draft=maybe": "draft=maybe is not 0 or 1",
    "tp=2,tp=2": r"tp is given twice \(say each once; cache",
    "tpp": r"'tpp' is not known \(did you mean tp\?\)",
    "cache=sglang,order=hnd": r"order is given twice \(say each once; cache=... stands for arrange and order\)",
    "arrange=page,cache=sglang": "arrange is given twice",
    "cache=sglangg": r"cache=sglangg is not known \(one of sglang, vllm-nhd, vllm-hnd\)",
    "tp=0": "tp=0 is below 1",
    "page=-1": "page=-1 is below 1",
    "order=dhn": r"order=dhn is not known \(one of hnd, nhd\)",
    "arrange=token": r"arrange=token is not known \(one of layer, block, page\)",
    "deal=cards": r"deal=cards is not known \(one of contiguous, zigzag, page, token\)",
    "cp=2,dcp=2": r"cp=2 and dcp=2 were both given \(dcp=N is cp=N,deal=token: give one of them\)",
    "dcp=2,deal=page": "dcp=2 and deal=page were both given",
    "dp=64,tp=65": "4160 ranks are more than 4096",
    "tp=99999999999999999999": "ranks are more than 4096",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_grid_is_refused_in_words(text):
    with pytest.raises(InputError, match=WRONG[text]):
        parse_grid(text)


# deals, stages, heads


@pytest.mark.parametrize(
    ("text", "rank", "deal"),
    [
        ("tp=4", 0, Cyclic()),
        ("dcp=4", 1, Cyclic(1, 4, 1)),
        ("dcp=4,deal=token", 1, Cyclic(1, 4, 1)),
        ("cp=4,deal=token", 3, Cyclic(1, 4, 3)),
        ("cp=4,deal=page,page=64", 2, Cyclic(64, 4, 2)),
        ("cp=4,page=64", 2, Ranges(4, (2,), 64)),
        ("cp=4,deal=zigzag,page=64", 1, Ranges(8, (1, 6), 64)),
    ],
)
def test_a_context_parallel_rank_is_dealt_its_tokens(text, rank, deal):
    assert deal_of(parse_grid(text), rank) == deal


def test_stages_are_even_with_the_first_ones_longer_or_as_they_are_told():
    assert stage_layers(parse_grid("pp=3"), 5) == [range(2), range(2, 4), range(4, 5)]
    assert stage_layers(parse_grid("pp=2,stages=1/4"), 5) == [range(1), range(1, 5)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp=6", r"pp=6 stages for 5 layers \(each stage needs a layer"),
        ("pp=2,stages=1/3", r"2 stages of 4 layers, but pp=2 and the model has 5 layers \(one number per stage"),
        ("pp=3,stages=1/4", "2 stages of 5 layers, but pp=3"),
        ("pp=2,stages=6/-1", "one number per stage, all positive"),
        ("pp=2,stages=0/5", "one number per stage, all positive"),
        ("pp=2,stages=one/4", r'stages=one/4 is no list of numbers \(e.g. "12/18"\)'),
    ],
)
def test_stages_that_do_not_fit_the_model_are_refused(text, words):
    with pytest.raises(InputError, match=words):
        layouts_of(SMALL, parse_grid(text), 2)


@pytest.mark.parametrize(
    ("heads", "tp", "held"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (3, 2, [(0, 1), (1, 3)]),
        (9, 4, [(0, 2), (2, 4), (4, 6), (6, 9)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (3, 4, [(0, 1), (0, 1), (1, 2), (2, 3)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_heads_are_cut_evenly_and_repeated_where_there_are_more_ranks(heads, tp, held):
    assert [head_interval(heads, tp, rank) for rank in range(tp)] == held


@pytest.mark.parametrize("tp", range(1, 10))
def test_no_head_is_lost_however_many_ranks_there_are(tp):
    cut = [interval for interval, _ in groupby(head_interval(3, tp, rank) for rank in range(tp))]
    assert [head for h0, h1 in cut for head in range(h0, h1)] == [0, 1, 2]


# layouts


@pytest.mark.parametrize("arrange", ["layer", "block", "page"])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_the_ranks_of_a_grid_hold_the_whole_model_once(arrange, order):
    held = []
    for layout in layouts_of(SMALL, parse_grid(f"tp=2,pp=3,arrange={arrange},order={order}"), 5):
        validate(layout, "prefill")
        held += [
            (layer, head, field.name)
            for tensor in layout.tensors
            for layer in tensor.layers
            for h0, h1 in tensor.heads
            for head in range(h0, h1)
            for field in tensor.fields
        ]
    assert sorted(held) == [(layer, head, field) for layer in range(5) for head in range(3) for field in "kv"]


def test_a_rank_holds_the_layers_of_its_stage_and_declares_all_spaces():
    layouts = layouts_of(STATE, parse_grid("pp=2,tp=2"), 3)
    assert [layout.rank for layout in layouts] == parse_grid("pp=2,tp=2").ranks()
    held = [{layer for tensor in layout.tensors for layer in tensor.layers} for layout in layouts]
    assert held == [{0, 1, 2}, {0, 1, 2}, {3, 4, 5}, {3, 4, 5}]
    assert {tuple(space.name for space in layout.spaces) for layout in layouts} == {("kv", "swa", "mamba", "row")}


def test_what_is_kept_once_is_not_dealt_out():
    layout = layout_of(STATE, parse_grid("cp=2,page=8"), Rank(cp=1), 3)
    assert layout.spaces == (
        Space("kv", 8, Ranges(2, (1,), 8)),
        Space("swa", 8, Ranges(2, (1,), 8), Window(9)),
        Space("mamba", 1, Cyclic(), Slot()),
        Space("row", 1, Cyclic(), Rows()),
    )
    (scale,) = (t.fields[0] for t in layout.tensors if t.layers == (0,) and t.fields[0].name == "scale")
    assert (scale.per, scale.granule_tokens, scale.nbytes, scale.format) == ("page", 8, 4, "float32")


def test_draft_layers_are_held_on_demand_on_the_last_stage():
    plain, drafting = (layouts_of(STATE, parse_grid(f"pp=2,draft={draft}"), 2) for draft in (0, 1))
    assert not any(6 in tensor.layers for layout in plain for tensor in layout.tensors)
    assert [any(6 in tensor.layers for tensor in layout.tensors) for layout in drafting] == [False, True]
    assert {tensor.optional for tensor in drafting[1].tensors} == {False, True}
    assert covers(drafting, plain[1]) == covers(plain, drafting[1]) == "", "whichever side lacks them"


def test_draft_layers_that_a_model_does_not_have_are_refused():
    with pytest.raises(InputError, match=r"draft=1: small has no draft layers \(leave draft=1 away\)"):
        layouts_of(SMALL, parse_grid("draft=1"), 2)


def test_the_grid_may_say_another_dtype_and_it_must_be_known():
    layout = layout_of(SMALL, parse_grid("dtype=float8_e4m3fn"), Rank(), 2)
    assert (layout.dtype, layout.tensors[0].fields[0].nbytes) == ("float8_e4m3fn", 4)
    with pytest.raises(LayoutError, match="unknown cache dtype 'fp8'"):
        layout_of(SMALL, parse_grid("dtype=fp8"), Rank(), 2)


def test_a_dtype_of_its_own_stays_whatever_the_cache_has():
    layout = layout_of(MODELS["qwen3-next-80b-a3b"], parse_grid("dtype=float8_e4m3fn"), Rank(), 1)
    formats = {tensor.fields[0].name: tensor.fields[0].format for tensor in layout.tensors}
    assert (formats["temporal"], formats["conv_q"], formats["k"]) == ("float32", "bfloat16", "float8_e4m3fn")


def test_a_model_without_token_heads_has_none():
    model = ModelShape("m", (Block("mamba", (0,), (Item("s", 4, 2),), Slot(), "request"),))
    assert (model.kv_heads, model.layers) == (0, 1)
    assert STATE.layers == 6


# any two sides

DEALT = st.one_of(
    st.builds("cp={},deal={}".format, st.integers(1, 3), st.sampled_from(["contiguous", "zigzag", "page", "token"])),
    st.builds("dcp={}".format, st.integers(1, 3)),
)
GRIDS = st.builds(
    "pp={},tp={},page={},order={},arrange={},{}".format, st.integers(1, 3), st.integers(1, 5),
    st.sampled_from([1, 4, 16]), st.sampled_from(["nhd", "hnd"]), st.sampled_from(["layer", "block", "page"]), DEALT,
)  # fmt: skip
TOKENS_ONLY = ModelShape("drawn", tuple(block for block in STATE.blocks if block.per != "page"))
"""Fields per page can't be cut: they go between equal page sizes only."""


@settings(max_examples=60, deadline=None)
@given(GRIDS, GRIDS, st.integers(0, 1), st.integers(0, 1))
def test_any_two_grids_of_a_model_fit_together(prefill, decode, drafts, wants):
    here, there = parse_grid(f"{prefill},draft={drafts}"), parse_grid(f"{decode},draft={wants}")
    sources, targets = layouts_of(TOKENS_ONLY, here, 3), layouts_of(TOKENS_ONLY, there, 2)
    for layout in sources:
        validate(layout, "prefill")
    for target in targets:
        validate(target, "decode")
        assert {supports(source, target).reason for source in sources} == {""}
        assert covers(sources, target) == ""


@settings(max_examples=60, deadline=None)
@given(GRIDS)
def test_a_grid_with_fields_per_page_is_sound_unless_tokens_are_dealt_out_within_pages(words):
    grid = parse_grid(words)
    cut = "dcp" in words or "deal=token" in words
    cut = cut and grid.cp * grid.dcp > 1 and grid.page > 1
    for layout in layouts_of(STATE, grid, 3):
        if cut and any(tensor.fields[0].per == "page" for tensor in layout.tensors):
            with pytest.raises(LayoutError, match=r"granule_tokens .* does not divide unit_tokens 1"):
                validate(layout, "prefill")
        else:
            validate(layout, "prefill")
            assert sum(tensor.nbytes for tensor in layout.tensors) > 0


def test_the_layouts_of_a_grid_share_no_bytes_within_a_rank():
    """Every element's bytes are written once; then none of them is zero and none was written twice."""
    for words in ("", "tp=2,order=hnd,arrange=block", "arrange=page,page=4", "tp=2,pp=2,arrange=page"):
        grid = parse_grid(words)
        for layout in layouts_of(STATE, grid, 3):
            count = np.zeros(max(t.address + t.nbytes for t in layout.tensors), np.int8)
            sizes = {space.name: space.page_tokens for space in layout.spaces}
            for tensor in layout.tensors:
                heads = sum(h1 - h0 for h0, h1 in tensor.heads) or 1
                field, steps = tensor.fields[0], tensor.strides_bytes
                axes = (len(tensor.layers), tensor.pages, sizes[tensor.space] // field.granule_tokens, heads)
                index = np.indices(axes).reshape(4, -1)
                start = tensor.address + np.array([steps.layer, steps.page, steps.token, steps.head]) @ index
                np.add.at(count, (start[:, None] + np.arange(field.nbytes)).ravel(), 1)
            assert (count == 1).all(), words


def test_each_space_may_have_as_many_pages_as_it_needs():
    layout = layout_of(MODELS["gpt-oss-20b"], Grid(), Rank(), {"kv": 7, "swa": 3})
    assert {(tensor.space, tensor.pages) for tensor in layout.tensors} == {("kv", 7), ("swa", 3)}
    alike = layout_of(MODELS["gpt-oss-20b"], Grid(), Rank(), {"kv": 7, "swa": 7})
    assert alike == layout_of(MODELS["gpt-oss-20b"], Grid(), Rank(), 7)
