"""SGLang's KVArgs as layouts: an element is where SGLang's own tensors have it. Nothing of SGLang is imported."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.compat.sglang.geometry import Geometry
from kvferry.compat.sglang.layouts import STATES, host_args, layout_of
from kvferry.compat.sglang.states import States
from kvferry.errors import InputError, LayoutError
from kvferry.ids import Rank
from kvferry.layout import Device, covers, supports, validate
from kvferry.plan import Election, PageList
from kvferry.testing.oracle import cells

PAGE, SLOTS, LAYERS, HEADS, DIM = 4, 24, 3, 4, 8


def geometry(tp=0, tp_size=1, **more):
    facts = {
        "model": "m", "layers": LAYERS, "dtype": "float16", "kv_heads": HEADS, "swa_kv_heads": HEADS,
        "rank": Rank(tp=tp),
        "sizes": Rank(1, 1, 1, tp_size), "state_tp_rank": tp, "state_tp_size": tp_size,
    }  # fmt: skip
    return Geometry(**{**facts, **more})


def kv_args(pools, **more):
    """KVArgs of pools [slots, ...], one per entry; an item is a page."""
    facts = {
        "page_size": PAGE, "kv_cache_dtype_str": "float16", "num_draft_entries": 0, "kv_layer_ids": [],
        "kv_data_ptrs": [pool.ctypes.data for pool in pools],
        "kv_data_lens": [pool.nbytes for pool in pools], "kv_item_lens": [pool[0].nbytes * PAGE for pool in pools],
        "state_types": [], "state_data_ptrs": [], "state_data_lens": [], "state_item_lens": [], "state_layer_ids": [],
        "state_dim_per_tensor": [], "state_slice_outer_counts": [], "state_conv_shard_groups": [],
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **more}, pools=list(pools))


def state(args, name, pools, *, item=1, layers=(), dims=(), outers=(), groups=()):
    args.pools += pools
    args.state_types.append(SimpleNamespace(value=name))
    args.state_data_ptrs.append([pool.ctypes.data for pool in pools])
    args.state_data_lens.append([pool.nbytes for pool in pools])
    args.state_item_lens.append([pool[0].nbytes * item for pool in pools])
    args.state_layer_ids.append(list(layers))
    args.state_dim_per_tensor.append(list(dims))
    args.state_slice_outer_counts.append(list(outers))
    args.state_conv_shard_groups.append(list(groups))
    return args


def mha(heads=HEADS, layers=LAYERS):
    return [np.zeros((SLOTS, heads, DIM), np.float16) for _ in range(2 * layers)]


def at(array, *index):
    return array.ctypes.data + sum(i * stride for i, stride in zip(index, array.strides, strict=False))


def test_k_and_v_of_all_layers_are_where_the_pools_have_them():
    pools = mha(heads=2)
    layout = layout_of(kv_args(pools), geometry(tp=1, tp_size=2, first_layer=5))
    validate(layout, "prefill", bound=True)
    found = cells(layout, {"kv": PageList(np.array([3, 1], np.int32))}, 0, 7)
    assert found["kv", 6, "v", 3, 5][0] == at(pools[LAYERS + 1], 1 * PAGE + 1, 1, 0)
    assert found["kv", 5, "k", 2, 0] == (at(pools[0], 3 * PAGE, 0, 0), 2 * DIM)
    assert len(found) == LAYERS * 2 * 2 * 7


def test_latents_have_no_heads():
    pools = [np.zeros((SLOTS, 1, 9), np.float16) for _ in range(LAYERS)]
    layout = layout_of(kv_args(pools), geometry(kv_heads=0))
    validate(layout, "decode", bound=True)
    found = cells(layout, {"kv": PageList(np.array([2], np.int32))}, 0, 3)
    assert found["kv", 1, "latent", -1, 2] == (at(pools[1], 2 * PAGE + 2, 0, 0), 18)


def test_draft_layers_come_after_the_models_and_may_be_missing_at_prefill():
    pools = [*mha(), *mha(layers=1)]
    with_draft = layout_of(kv_args(pools, num_draft_entries=2), geometry())
    without = layout_of(kv_args(mha()), geometry())
    assert {tensor.layers[0] for tensor in with_draft.tensors if tensor.optional} == {LAYERS}
    assert covers([without], with_draft) == ""
    assert covers([with_draft], without) == ""


def test_a_pool_in_host_memory_has_the_same_regions_elsewhere():
    device, host = mha(), [np.zeros((3 * SLOTS, HEADS, DIM), np.float16) for _ in range(2 * LAYERS)]
    swa, host_swa = ([np.zeros((slots, HEADS, DIM), np.float16)] * 2 for slots in (SLOTS, 2 * SLOTS))
    args = state(kv_args(device), "swa", swa, item=PAGE)
    assert host_args(args) is None
    there = state(kv_args(host), "swa", host_swa, item=PAGE)
    for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens", "state_data_ptrs", "state_data_lens"):
        setattr(args, f"host_{name}", getattr(there, name))
    args.host_state_item_lens = there.state_item_lens
    ours = geometry(device=3)
    assert layout_of(host_args(args), ours.on_host()) == layout_of(there, geometry())
    assert {type(tensor.memory) for tensor in layout_of(args, ours).tensors} == {Device}
    assert {tensor.pages for tensor in layout_of(args, ours).tensors} == {SLOTS // PAGE}


def test_layers_of_a_hybrid_model_keep_their_numbers():
    layout = layout_of(kv_args(mha(layers=2), kv_layer_ids=[3, 7, 3, 7]), geometry())
    assert [(tensor.layers[0], tensor.fields[0].name) for tensor in layout.tensors] == [
        (3, "k"), (7, "k"), (3, "v"), (7, "v"),
    ]  # fmt: skip


def test_conv_state_is_cut_group_by_group_and_every_byte_of_a_slot_is_there():
    """Groups of 128, 128 and 256 channels, sharded on their own over two ranks; three rows of a window."""
    conv = [np.zeros((5, 256, 3), np.float16) for _ in range(2)]
    temporal = [np.zeros((5, 8, 4, 4), np.float32) for _ in range(2)]
    ranks = []
    for tp in range(2):
        args = kv_args(mha(heads=2))
        state(
            args, "mamba", [*conv, *temporal], layers=[1, 2, 1, 2], dims=[256, 256, 8, 8], outers=[1] * 4,
            groups=[[128, 128, 256]] * 2 + [None] * 2,
        )  # fmt: skip
        ranks.append(layout_of(args, geometry(tp=tp, tp_size=2)))
        validate(ranks[-1], "prefill", bound=True)
    pages = {"kv": PageList(np.zeros(0, np.int32)), "mamba": PageList(np.array([2], np.int32))}
    found = cells(ranks[1], pages, 0, 0)
    # the second rank has channels 64 to 127 of the first group, at the start of its slot: 64 units of one channel
    assert found["mamba", 1, "t0.0.0", 64, 0] == (at(conv[0], 2, 0, 0), 6)
    assert found["mamba", 1, "t0.1.0", 64, 0] == (at(conv[0], 2, 64, 0), 6)
    assert found["mamba", 2, "t0.2.0", 64, 0] == (at(conv[1], 2, 128, 0), 12)
    assert found["mamba", 2, "t1.0.0", 8, 0] == (at(temporal[1], 2, 0, 0, 0), 64)
    for pool in (*conv, *temporal):
        inside = [nbytes for address, nbytes in found.values() if 0 <= address - pool.ctypes.data < pool.nbytes]
        assert sum(inside) == pool[0].nbytes


def test_a_state_whose_slice_axis_is_not_the_first_has_a_field_for_each_row():
    conv = [np.zeros((5, 3, 64), np.float16)]
    args = state(kv_args(mha()), "mamba", conv, layers=[1], dims=[64], outers=[3], groups=[None])
    layout = layout_of(args, geometry())
    validate(layout, "prefill", bound=True)
    pages = {"kv": PageList(np.zeros(0, np.int32)), "mamba": PageList(np.array([4], np.int32))}
    found = cells(layout, pages, 0, 0)
    assert found["mamba", 1, "t0.0.2", 63, 0] == (at(conv[0], 4, 2, 63), 2)


def test_state_that_every_rank_holds_alike_is_sent_by_one():
    pools = [np.zeros((5, 10), np.int8)]
    layouts = [
        layout_of(state(kv_args(mha(heads=2)), "mamba", pools, layers=[0], dims=[0]), geometry(tp=tp, tp_size=2))
        for tp in range(2)
    ]
    whole = layout_of(state(kv_args(mha()), "mamba", pools, layers=[0], dims=[0]), geometry())
    shares = Election(whole, layouts).shares(0)
    assert [share.sends.get("mamba", ()) for share in shares] == [("t0",), ()]


def test_pages_of_a_window_are_cut_by_heads():
    args = [
        state(kv_args(mha(heads=HEADS // size)), "swa", mha(heads=HEADS // size, layers=1), item=PAGE)
        for size in (1, 2, 2)
    ]
    whole = layout_of(args[0], geometry())
    halves = [layout_of(each, geometry(tp=tp, tp_size=2)) for tp, each in enumerate(args[1:])]
    assert covers(halves, whole) == ""
    assert all(supports(half, whole) for half in halves)
    found = cells(whole, {name: PageList(np.array([1], np.int32)) for name in ("kv", "swa")}, 0, 1, rows=1)
    assert len([key for key in found if key[0] == "swa"]) == 2 * HEADS * PAGE


@pytest.mark.parametrize("name", sorted(set(STATES) - {"mamba", "swa", "minimax_dense_kv"}))
def test_items_that_cannot_be_cut_are_carried_whole(name):
    pools = [np.zeros((6, 40), np.int8) for _ in range(2)]
    layout = layout_of(state(kv_args(mha()), name, pools), geometry())
    validate(layout, "prefill", bound=True)
    pages = {"kv": PageList(np.zeros(0, np.int32)), STATES[name].space: PageList(np.array([5, 2], np.int32))}
    found = cells(layout, pages, 0, 0, rows=2)
    assert sorted(found.values()) == sorted((at(pool, row, 0), 40) for pool in pools for row in (5, 2))


@pytest.mark.parametrize("name", ["dsa_tail", "c4_state_of_next_year"])
def test_state_that_is_not_known_is_refused_by_name(name):
    with pytest.raises(LayoutError, match=f"state '{name}'"):
        layout_of(state(kv_args(mha()), name, []), geometry())


def test_sizes_that_contradict_each_other_are_named():
    pools = [np.zeros((5, 9), np.int8)]
    for words, args, facts in [
        ("5 KV regions", kv_args(mha()[:5]), {}),
        ("is not 4 tokens of 12 heads", kv_args(mha()), {"kv_heads": 3 * HEADS}),
        ("a slot of 9 bytes is not 1 rows of 4", state(kv_args(mha()), "mamba", pools, layers=[0], dims=[4]), {}),
    ]:
        with pytest.raises(LayoutError, match=words):
            layout_of(args, geometry(**facts))


def test_a_group_that_the_ranks_do_not_divide_is_named():
    args = state(kv_args(mha(heads=1)), "mamba", [np.zeros((5, 4), np.int8)], layers=[0], dims=[4], groups=[[8]])
    with pytest.raises(LayoutError, match="group 0 of 8 channels in 8 parts over 3 TP ranks"):
        layout_of(args, geometry(tp_size=3))


def test_lists_of_all_pages_leave_the_decode_prefix_out():
    states = States([SimpleNamespace(value=name) for name in ("mamba", "block_scale", "swa")], 4)
    found = states.named([np.array([3]), np.arange(10, 16), None], 8)
    assert {name: numbers.tolist() for name, numbers in found.items()} == {
        "mamba": [3], "block_scale": [12, 13, 14, 15], "swa": [],
    }  # fmt: skip
    with pytest.raises(InputError, match="2 state lists for 3 kinds"):
        states.named([None, None], 0)


def test_state_without_layer_ids_is_refused_where_stages_share_out_the_layers():
    args = state(kv_args(mha()), "swa", mha(layers=1), item=PAGE)
    with pytest.raises(LayoutError, match=r"space 'swa'.*pp=2 stages"):
        layout_of(args, geometry(sizes=Rank(1, 2, 1, 1)))
