"""A grid in words, and what each of its ranks holds of a model."""

from itertools import groupby

import pytest

from kvferry.errors import InputError, LayoutError
from kvferry.ids import Rank
from kvferry.layout import Cyclic, Ranges, Slot, validate
from kvferry.presets import Block, Grid, Item, ModelShape, attention, layout_of, layouts_of, parse_grid
from kvferry.presets.grid import deal_of, head_interval, stage_layers

MODEL = attention("m", layers=7, kv_heads=3, head_dim=4, dtype="float16")


def test_words_become_a_grid_and_what_is_not_said_is_the_default():
    assert parse_grid("") == Grid()
    assert parse_grid(" tp=4, pp = 2 ,order=HND,stages=3/4") == Grid(tp=4, pp=2, order="hnd", stages="3/4")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pge=2", r"'pge=2' is not known \(did you mean page\?\)"),
        ("xyzzy=2", r"not known \(name=value of dp, pp"),
        ("tp", r"'tp' is not known \(name=value of dp, pp"),
        ("tp=2,tp=3", "tp is given twice"),
        ("tp=two", "tp=two is no whole number"),
        ("page=0", "page=0 is below 1"),
        ("order=dnh", r"order=dnh is not known \(one of hnd, nhd\)"),
        ("arrange=heap", r"arrange=heap is not known \(one of layer, block, page\)"),
        ("deal=cards", "deal=cards is not known"),
        ("cp=2,dcp=2", r"cp=2 and dcp=2 were both given \(dcp=N is cp=N,deal=token"),
        ("tp=64,pp=65", "4160 ranks are more than 4096"),
    ],
)
def test_what_is_no_grid_is_refused(text, says):
    with pytest.raises(InputError, match=says):
        parse_grid(text)


def test_ranks_of_a_group_come_stage_by_stage():
    grid = parse_grid("pp=2,dcp=2,tp=2,dp=3")
    assert grid.size == 8
    assert grid.ranks(2)[:5] == [Rank(2, 0, 0, 0), Rank(2, 0, 0, 1), Rank(2, 0, 1, 0), Rank(2, 0, 1, 1), Rank(2, 1)]


@pytest.mark.parametrize(
    ("text", "deal"),
    [
        ("tp=2", Cyclic()),
        ("cp=3,page=8", Ranges(3, (1,), 8)),
        ("cp=3,page=8,deal=zigzag", Ranges(6, (1, 4), 8)),
        ("cp=3,page=8,deal=page", Cyclic(8, 3, 1)),
        ("cp=3,page=8,deal=token", Cyclic(1, 3, 1)),
        ("dcp=3,page=8", Cyclic(1, 3, 1)),
    ],
)
def test_context_parallel_ranks_share_out_a_request(text, deal):
    assert deal_of(parse_grid(text), 1) == deal


def test_stages_are_even_or_as_said():
    assert stage_layers(Grid(pp=3), 7) == [range(3), range(3, 5), range(5, 7)]
    assert stage_layers(Grid(pp=2, stages="1/6"), 7) == [range(1), range(1, 7)]


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        (Grid(pp=8), "pp=8 stages for 7 layers"),
        (Grid(pp=2, stages="3/3"), "2 stages of 6 layers, but pp=2 and the model has 7 layers"),
        (Grid(pp=3, stages="3/4"), "2 stages of 7 layers, but pp=3"),
        (Grid(pp=2, stages="0/7"), "2 stages of 7 layers"),
        (Grid(pp=2, stages="a/b"), "stages=a/b is no list of numbers"),
    ],
)
def test_stages_that_do_not_fit_the_model_are_refused(grid, says):
    with pytest.raises(InputError, match=says):
        layout_of(MODEL, grid, Rank(), pages=2)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 9])
def test_heads_are_cut_evenly_and_repeated_where_there_are_fewer_than_ranks(tp):
    intervals = [head_interval(3, tp, rank) for rank in range(tp)]
    distinct = [interval for interval, _ in groupby(intervals)]
    assert [head for h0, h1 in distinct for head in range(h0, h1)] == [0, 1, 2]


@pytest.mark.parametrize("arrange", ["layer", "block", "page"])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_the_ranks_of_a_grid_hold_the_whole_model_once(arrange, order):
    layouts = layouts_of(MODEL, Grid(tp=2, pp=3, arrange=arrange, order=order), pages=5)
    held = []
    for layout in layouts:
        validate(layout, "prefill")
        held += [
            (layer, head, field.name)
            for tensor in layout.tensors
            for layer in tensor.layers
            for h0, h1 in tensor.heads
            for head in range(h0, h1)
            for field in tensor.fields
        ]
    assert sorted(held) == [(layer, head, field) for layer in range(7) for head in range(3) for field in "kv"]


def test_a_grid_may_name_another_dtype():
    assert layout_of(MODEL, Grid(dtype="float32"), Rank(), 2).tensors[0].fields[0].nbytes == 16
    with pytest.raises(LayoutError, match="unknown cache dtype 'float17'"):
        layout_of(MODEL, Grid(dtype="float17"), Rank(), 2)


def test_state_and_scales_lie_beside_the_tokens_of_a_rank():
    shape = ModelShape(
        "hybrid",
        (
            Block("kv", (0, 2), (Item("k", 4, 2), Item("v", 4, 2))),
            Block("kv", (0, 2), (Item("scale", 1, 0, "float32"),), per="page"),
            Block("state", (1,), (Item("ssm", 6, 4),), Slot(), per="request"),
        ),
        "float16",
    )
    assert (shape.layers, shape.kv_heads) == (3, 2)
    first, second = layouts_of(shape, Grid(pp=2, page=8, cp=2), pages=3)[::2]
    for layout in (first, second):
        validate(layout, "decode")
        assert [space.name for space in layout.spaces] == ["kv", "state"]
        assert layout.spaces[1].page_tokens == 1
    kinds = {field.name: (field.nbytes, field.granule_tokens) for each in first.tensors for field in each.fields}
    assert kinds == {"k": (8, 1), "v": (8, 1), "scale": (4, 8), "ssm": (12, 1)}
    assert {each.space for each in second.tensors} == {"kv"}
