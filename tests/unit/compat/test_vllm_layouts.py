"""vLLM's caches as layouts: a cell is where vLLM's own tensor has it. Nothing of vLLM is imported."""

import msgspec
import numpy as np
import pytest

from kvferry.compat.vllm.layouts import CacheGroup, CacheTensor, Geometry, layout_of, space_of
from kvferry.errors import LayoutError
from kvferry.layout import All, Window, covers, supports, validate

BLOCKS, BLOCK, CONTENT, LAYERS, HEADS = 6, 32, 8, 3, 4
GROUP = CacheGroup(BLOCK)


def geometry(tp_rank=0, tp_size=1, **more):
    facts = {"model": "m", "dtype": "bfloat16", "kv_heads": HEADS, "head_dim": CONTENT // 2, "num_blocks": BLOCKS,
             "groups": (GROUP,)}  # fmt: skip
    return Geometry(tp_rank=tp_rank, tp_size=tp_size, **{**facts, **more})


def caches(pool, **more):
    """CacheTensors of a pool uint16[layers, blocks, heads, tokens, content], in whatever order it lies in memory."""
    return [
        CacheTensor(f"model.layers.{i}.attn", i, 0, layer.ctypes.data, layer.shape, layer.strides, 2,
                    **{"format": "vllm/CPU_ATTN/vec/bfloat16", **more})
        for i, layer in enumerate(pool)
    ]  # fmt: skip


def pool_of(heads=HEADS, blocks=BLOCKS, tokens=BLOCK):
    return np.arange(LAYERS * blocks * heads * tokens * CONTENT, dtype=np.uint16).reshape(
        LAYERS, blocks, heads, tokens, CONTENT
    )


def bytes_at(address, nbytes, pool):
    begin = address - pool.__array_interface__["data"][0]
    return pool.view(np.uint8).reshape(-1)[begin : begin + nbytes].tobytes()


@pytest.mark.parametrize("block_outermost", [False, True])
def test_a_cell_is_where_vllm_has_it(block_outermost):
    pool = pool_of()
    view = pool.reshape(BLOCKS, LAYERS, HEADS, BLOCK, CONTENT).swapaxes(0, 1) if block_outermost else pool
    layout = layout_of(geometry(), caches(view))
    validate(layout, "prefill", bound=True)
    for tensor in layout.tensors:
        (layer,) = tensor.layers
        strides = tensor.strides_bytes
        for block, head in np.ndindex(BLOCKS, HEADS):
            address = tensor.address + block * strides.page + head * strides.head
            assert bytes_at(address, tensor.fields[0].nbytes, pool) == view[layer, block, head].tobytes()


def test_kernel_blocks_are_parts_of_a_block():
    pool = pool_of(blocks=2 * BLOCKS)
    layout = layout_of(geometry(groups=(CacheGroup(2 * BLOCK),)), caches(pool))
    validate(layout, "prefill", bound=True)
    tensor = layout.tensors[1]
    strides = tensor.strides_bytes
    for block, part, head in np.ndindex(BLOCKS, 2, HEADS):
        address = tensor.address + block * strides.page + part * strides.token + head * strides.head
        assert bytes_at(address, tensor.fields[0].nbytes, pool) == pool[1, 2 * block + part, head].tobytes()


@pytest.mark.parametrize(
    ("tp_size", "held", "intervals"),
    [
        (1, 4, [(0, 4)]),
        (2, 2, [(0, 2), (2, 4)]),
        (8, 1, [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4)]),
    ],
)
def test_every_rank_says_which_heads_of_the_model_it_holds(tp_size, held, intervals):
    pool = pool_of(heads=held)
    ranks = [layout_of(geometry(rank, tp_size), caches(pool)) for rank in range(tp_size)]
    assert [layout.tensors[0].heads for layout in ranks] == [(interval,) for interval in intervals]
    whole = layout_of(geometry(), caches(pool_of()))
    assert all(supports(layout, whole) and supports(whole, layout) for layout in ranks)
    assert covers(ranks, whole) == "" == covers([whole], ranks[-1])


def test_other_block_sizes_formats_and_models_are_refused_with_both_values():
    here = layout_of(geometry(), caches(pool_of()))
    larger = layout_of(geometry(groups=(CacheGroup(64),)), caches(pool_of(tokens=64)))
    reason = supports(here, larger).reason
    assert "granule_tokens of field 'kv' in space 'kv', layer 0: prefill has 32, decode has 64" in reason
    amx = layout_of(geometry(), caches(pool_of(), format="vllm/CPU_ATTN/amx/bfloat16"))
    assert "prefill has 'vllm/CPU_ATTN/vec/bfloat16', decode has 'vllm/CPU_ATTN/amx" in supports(here, amx).reason
    assert "prefill has 'm', decode has 'n'" in supports(here, msgspec.structs.replace(here, model="n")).reason


def test_a_cell_is_never_cut():
    (first, *_) = layout_of(geometry(), caches(pool_of())).tensors
    assert first.fields[0].granule_tokens == BLOCK
    assert first.fields[0].nbytes == BLOCK * CONTENT * 2


def test_a_window_keeps_what_the_next_token_attends_to():
    assert space_of(0, GROUP).coverage == All()
    assert space_of(1, CacheGroup(BLOCK, 64)).coverage == Window(63)
    assert (space_of(0, GROUP).name, space_of(1, GROUP).name) == ("kv", "kv1")


def test_what_is_arranged_otherwise_is_refused_by_the_layers_name():
    token_major = pool_of().swapaxes(2, 3).copy().swapaxes(2, 3)
    with pytest.raises(LayoutError, match=r"layers\.0\.attn.*not side by side.*HND"):
        layout_of(geometry(), caches(token_major))
    with pytest.raises(LayoutError, match=r"6 kernel blocks of 32 tokens do not make 7 blocks of 32"):
        layout_of(geometry(num_blocks=7), caches(pool_of()))
    with pytest.raises(LayoutError, match=r"3 KV heads on each of 1 TP ranks, the model has 4"):
        layout_of(geometry(), caches(pool_of(heads=3)))


def test_device_memory_is_declared_as_such():
    (first, *_) = layout_of(geometry(), caches(pool_of(), device=1)).tensors
    assert first.memory.index == 1
