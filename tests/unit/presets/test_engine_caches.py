"""A layout's address of an element is the address that the engine's own tensor has at the element's index.

The shapes are those of `ENGINE_CACHES`, where their sources are named.
"""

import numpy as np
import pytest

from kvferry.layout import bind, validate
from kvferry.presets import ENGINE_CACHES, MODELS, attention, layout_of, parse_grid

PAGES, PAGE = 5, 4
SMALL = attention("small", layers=3, kv_heads=4, head_dim=8)


def address(layout, layer, field, head, page, token):
    """Where an element lies, by the rule in the docstring of `Tensor`."""
    (tensor,) = (t for t in layout.tensors if layer in t.layers and t.fields[0].name == field)
    local = [h for h0, h1 in tensor.heads for h in range(h0, h1)].index(head) if tensor.heads else 0
    steps = tensor.strides_bytes
    return (
        tensor.address + tensor.layers.index(layer) * steps.layer + page * steps.page + token * steps.token
        + local * steps.head
    )  # fmt: skip


def place(array, *index):
    return array[index].ctypes.data


def made(model, words, rank, buffers):
    """A bound layout; of one buffer for all tensors, or one (an array, or its address and bytes) for each."""
    grid = parse_grid(f"{words},page={PAGE}")
    places = [(b.ctypes.data, b.nbytes) if isinstance(b, np.ndarray) else b for b in buffers]
    layout = bind(layout_of(model, grid, grid.ranks()[rank], PAGES), places)
    validate(layout, "prefill", bound=True)
    return layout


ELEMENTS = [(0, 2, 0, 0), (1, 3, 4, 3), (2, 2, 1, 2), (2, 3, 3, 1)]
"""Layer, global head (of TP rank 1 of 2), page, token."""


def test_sglang_mha_pools_are_a_tensor_per_layer_k_then_v():
    k_buffer, v_buffer = ([np.zeros((PAGES * PAGE, 2, 8), np.uint16) for _ in range(3)] for _ in range(2))
    layout = made(SMALL, "tp=2,cache=sglang", 1, [*k_buffer, *v_buffer])
    for layer, head, page, token in ELEMENTS:
        row = page * PAGE + token
        assert address(layout, layer, "k", head, page, token) == place(k_buffer[layer], row, head - 2)
        assert address(layout, layer, "v", head, page, token) == place(v_buffer[layer], row, head - 2)


def test_sglang_mla_pools_are_a_tensor_per_layer_without_heads():
    kv_buffer = [np.zeros((PAGES * PAGE, 1, 576), np.uint16) for _ in range(61)]
    layout = made(MODELS["deepseek-r1"], "tp=2,cache=sglang", 1, kv_buffer)
    for layer, page, token in [(0, 0, 0), (60, 4, 3), (7, 2, 1)]:
        assert address(layout, layer, "latent", 0, page, token) == place(kv_buffer[layer], page * PAGE + token, 0)


def carved(buffer, *shapes):
    """Consecutive arrays in one buffer: (dtype, shape) each."""
    at, arrays = 0, []
    for dtype, shape in shapes:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(buffer[at : at + nbytes].view(dtype).reshape(shape))
        at += nbytes
    assert at == buffer.nbytes
    return arrays


def test_sglang_hybrid_pools_hold_state_per_slot_with_the_groups_of_the_convolution_side_by_side():
    """Of TP rank 3 of 8: 2 query and key heads and 4 value heads of the delta nets, one KV head."""
    tokens, conv_channels = PAGES * PAGE, (2 + 2 + 4) * 128
    shapes = (
        (np.uint16, (12, tokens, 1, 256)), (np.uint16, (12, tokens, 1, 256)),
        (np.uint16, (36, PAGES, conv_channels, 3)), (np.float32, (36, PAGES, 4, 128, 128)),
    )  # fmt: skip
    buffer = np.zeros(sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for dtype, shape in shapes), np.uint8)
    k, v, conv, temporal = carved(buffer, *shapes)
    layout = made(MODELS["qwen3-next-80b-a3b"], "tp=8,cache=sglang", 3, [buffer])
    assert address(layout, 7, "k", 0, 2, 3) == place(k, 1, 2 * PAGE + 3, 0)
    assert address(layout, 47, "v", 0, 4, 0) == place(v, 11, 4 * PAGE, 0)
    for layer, index in [(0, 0), (4, 3), (46, 35)]:  # layers 3, 7, ... are attention
        for slot in (0, 4):
            assert address(layout, layer, "conv_q", 7, slot, 0) == place(conv, index, slot, 128)
            assert address(layout, layer, "conv_k", 6, slot, 0) == place(conv, index, slot, 2 * 128)
            assert address(layout, layer, "conv_v", 15, slot, 0) == place(conv, index, slot, (2 + 2 + 3) * 128)
            assert address(layout, layer, "temporal", 13, slot, 0) == place(temporal, index, slot, 1)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("cache", ["vllm-nhd", "vllm-hnd"])
def test_vllm_blocks_hold_k_and_v_side_by_side(cache, apart):
    """Layers in one storage, or allocated one by one: then V's tensor of a layer begins behind K's first block."""
    inner = (PAGE, 2) if cache == "vllm-nhd" else (2, PAGE)
    shape = (PAGES, 2, *inner, 8)
    whole = np.zeros((3, *shape), np.uint16)
    layers = [np.zeros(shape, np.uint16) for _ in range(3)] if apart else list(whole)
    values = [(place(layer, 0, 1), layer.nbytes - layer[0, 0].nbytes) for layer in layers]
    layout = made(SMALL, f"tp=2,cache={cache}", 1, [*layers, *values] if apart else [whole])
    for layer, head, page, token in ELEMENTS:
        at = (token, head - 2) if cache == "vllm-nhd" else (head - 2, token)
        assert address(layout, layer, "k", head, page, token) == place(layers[layer], page, 0, *at)
        assert address(layout, layer, "v", head, page, token) == place(layers[layer], page, 1, *at)


@pytest.mark.parametrize("name", ENGINE_CACHES)
def test_every_engine_cache_names_its_shapes_and_source_and_is_a_grid(name):
    cache = ENGINE_CACHES[name]
    assert all("[" in shape for shape in cache.shapes)
    assert "/" in cache.source
    grid = parse_grid(f"cache={name}")
    assert (grid.arrange, grid.order) == (cache.arrange, cache.order)
