"""The demo's grids: names of ranks, sizes of pools, and what is refused before a process is started."""

import pytest

from kvferry.errors import ConfigError, InputError
from kvferry.free_memory import FreeMemory
from kvferry.ids import Rank, Side
from kvferry.layout import num_pages
from kvferry.presets import Grid, parse_grid
from kvferry.serve.grids import (
    DEFAULT_GRID,
    check_grids,
    check_memory,
    grid_sizes,
    rank_layouts,
    rank_names,
    read_grid,
    shape_of,
)


@pytest.fixture
def model(tiny_config):
    return shape_of("tiny", tiny_config)


def check(model, prefill="", decode=""):
    check_grids(model, read_grid(prefill, Side.PREFILL), read_grid(decode, Side.DECODE), 100, 128)


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ("", ["decode"]),
        ("tp=2", ["decode tp0", "decode tp1"]),
        ("dcp=2", ["decode cp0", "decode cp1"]),
        ("pp=2,tp=2", ["decode pp0 tp0", "decode pp0 tp1", "decode pp1 tp0", "decode pp1 tp1"]),
    ],
)
def test_ranks_are_named_by_the_axes_that_have_several(grid, names):
    assert rank_names(Side.DECODE, parse_grid(grid)) == names


def test_decode_context_parallel_ranks_are_on_the_cp_axis():
    assert grid_sizes(parse_grid("dcp=3,tp=2,pp=4")) == Rank(1, 4, 3, 2)


@pytest.mark.parametrize("grid", [DEFAULT_GRID, "cp=3,deal=zigzag,page=8", "page=64", "dcp=2,page=1"])
def test_pools_hold_the_request_and_pages_that_stay_as_they_are(model, grid):
    layouts = rank_layouts(model, parse_grid(grid), 100)
    spare = [layout.tensors[0].pages - num_pages(layout.spaces[0], 0, 100) for layout in layouts]
    assert min(spare) >= 2
    assert len({layout.tensors[0].pages for layout in layouts}) == 1


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("", ""), ("tp=5", "tp=2"), ("pp=3,tp=2,cp=2", "dcp=12"), ("stages=1/2,pp=2", "page=128"), ("dtype=float16", "")],
)
def test_grids_that_can_be_run(model, prefill, decode):
    check(model, prefill, decode)


@pytest.mark.parametrize("ranks", [1, 3])
def test_prompts_that_all_ranks_can_not_compute_at_once_are_refused(ranks, tiny_config, monkeypatch):
    free_mib = [2]
    monkeypatch.setattr("kvferry.serve.grids.free_memory", lambda: FreeMemory(free_mib[0] << 20, "this machine"))
    check_memory(tiny_config, Grid(tp=ranks), 100)
    free_mib[0] = 0
    with pytest.raises(InputError, match=f"{ranks} processes, .* all 100 tokens .* this machine has 0 MiB free"):
        check_memory(tiny_config, Grid(tp=ranks), 100)
    monkeypatch.setattr("kvferry.serve.grids.free_memory", lambda: None)
    check_memory(tiny_config, Grid(tp=ranks), 10**9)


REFUSED = {
    "an unknown key": ("", "pge=2", r"--decode: 'pge=2': 'pge=2' is not known \(did you mean page\?\)"),
    "a size below 1": ("tp=0", "", "--prefill: tp=0 is below 1"),
    "DP groups": ("dp=2", "", r"--prefill: dp=2, but the demo has one request.*\(leave dp away\)"),
    "too many processes": ("tp=16", "tp=9", "16 prefill and 9 decode ranks: .* at most 24"),
    "more stages than layers": ("", "pp=4", "--decode: pp=4 stages for 3 layers"),
    "stages that do not add up": ("pp=2,stages=1/1", "", "--prefill: stages=1/1: 2 stages of 2 layers, but pp=2"),
    "pages larger than the context": ("page=129", "", "--prefill: page=129 exceeds the model's context of 128 tokens"),
    "an unknown dtype": ("dtype=float17", "", "--prefill: unknown cache dtype 'float17'"),
    "another dtype on one side": ("", "dtype=bfloat16", "not fit together: dtype: prefill has 'float16', decode has"),
    "another dtype on both sides": ("dtype=int8", "dtype=int8", "dtype=int8: the demo's model keeps float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_run_is_refused_with_its_side(model, name):
    prefill, decode, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        check(model, prefill, decode)
