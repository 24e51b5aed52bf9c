"""The models keep what their configurations say, and name their sources."""

import pytest

from kvferry.errors import InputError
from kvferry.layout import Slot, Window, validate
from kvferry.presets import MODELS, Grid, find_model, layout_of, parse_grid

BYTES = {
    "llama-3.1-8b": {"kv": 32 * 4096},
    "llama-3.1-70b": {"kv": 80 * 4096},
    "qwen3-8b": {"kv": 36 * 4096},
    "qwen3-235b-a22b": {"kv": 94 * 2048},
    "gpt-oss-20b": {"kv": 12 * 2048, "swa": 12 * 2048},
    "gpt-oss-120b": {"kv": 18 * 2048, "swa": 18 * 2048},
    "deepseek-r1": {"kv": 61 * 1152},
    "deepseek-v3": {"kv": 61 * 1152},
    "gemma-3-27b": {"kv": 10 * 8192, "swa": 52 * 8192},
    "smollm2-135m": {"kv": 30 * 768},
    # 36 delta nets: 8192 channels x 3 inputs in bfloat16, 32 matrices of 128 x 128 in float32
    "qwen3-next-80b-a3b": {"kv": 12 * 2048, "mamba": 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)},
}
"""Bytes per token, or per request for state, in the dtype that each cache usually has."""


def held_bytes(layout):
    tokens = {space.name: space.page_tokens for space in layout.spaces}
    held = dict.fromkeys(tokens, 0)
    for tensor in layout.tensors:
        held[tensor.space] += tensor.item_bytes * len(tensor.layers)
    return {name: nbytes // tokens[name] for name, nbytes in held.items()}


def test_every_model_is_in_the_table_of_this_test():
    assert set(BYTES) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_token_of_a_model_has_the_bytes_that_its_configuration_says(name):
    layout = layout_of(MODELS[name], Grid(), Grid().ranks()[0], 4)
    validate(layout, "prefill")
    assert held_bytes(layout) == BYTES[name]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_names_its_source_and_each_layer_once_per_field(name):
    model = MODELS[name]
    assert len(model.source) > 20
    held = [(layer, item.name) for block in model.blocks for item in block.items for layer in block.layers]
    assert len(held) == len(set(held))
    assert {layer for layer, _ in held} == set(range(1 + max(layer for layer, _ in held)))


def coverages(name):
    return {block.space: block.coverage for block in MODELS[name].blocks}


def test_windows_and_states_are_spaces_of_their_own():
    assert coverages("gpt-oss-20b")["swa"] == Window(128)
    assert coverages("gemma-3-27b")["swa"] == Window(1024)
    assert coverages("qwen3-next-80b-a3b")["mamba"] == Slot()
    assert [block.layers[:3] for block in MODELS["gemma-3-27b"].blocks] == [(5, 11, 17), (0, 1, 2)]
    assert [block.layers[:3] for block in MODELS["gpt-oss-20b"].blocks] == [(1, 3, 5), (0, 2, 4)]


def test_each_group_of_the_convolution_is_sharded_by_its_own_heads():
    grid = parse_grid("tp=4")
    layout = layout_of(MODELS["qwen3-next-80b-a3b"], grid, grid.ranks()[1], 2)
    heads = {tensor.fields[0].name: tensor.heads for tensor in layout.tensors}
    assert heads == {
        "k": ((0, 1),), "v": ((0, 1),), "conv_q": ((4, 8),), "conv_k": ((4, 8),), "conv_v": ((8, 16),),
        "temporal": ((8, 16),),
    }  # fmt: skip


def test_a_model_is_found_whatever_its_capitals():
    assert find_model(" DeepSeek-R1 ") is MODELS["deepseek-r1"]


def test_an_unknown_model_is_refused_with_the_nearest_names():
    with pytest.raises(InputError, match=r"unknown model 'deepseek-r2' \(did you mean deepseek-r1 or deepseek-v3\?\)"):
        find_model("deepseek-r2")


def test_a_name_that_is_like_none_gets_all_of_them():
    with pytest.raises(InputError, match=r"unknown model 'x' \(known: deepseek-r1, .*smollm2-135m\)"):
        find_model("x")
