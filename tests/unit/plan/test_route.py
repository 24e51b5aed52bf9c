"""What a route says about two layouts, before there is any request."""

import time

import msgspec
import numpy as np
import pytest

from kvferry.errors import InputError, LayoutError
from kvferry.ids import Rank
from kvferry.layout import Cyclic, Field, Layout, Ranges, Space, Strides, Tensor, bind
from kvferry.plan import PageList, Part, route, runs
from kvferry.presets import layer_major, mla, page_major

change = msgspec.structs.replace
SHAPE = {"layers": 4, "kv_heads": 2, "head_dim": 4, "dtype": "bfloat16", "pages": 8, "page_tokens": 4}


def make(preset=page_major, at=1 << 20, **rest):
    return bind(preset("m", **{**SHAPE, **rest}), [(at, 1 << 20)])


def scaled(granule, page_tokens, unit=1):
    """A layout with a per-granule scale beside K."""
    item = 8 * page_tokens
    k = Tensor("kv", (0,), ((0, 1),), (Field("k", 8),), 0, 1024, Strides(0, item, 8, 0), item, 4)
    count = page_tokens // granule
    scale = Field("scale", 3, headed=False, granule_tokens=granule, format="f24")
    s = Tensor("kv", (0,), (), (scale,), 1024, 64, Strides(0, 3 * count, 3, 0), 3 * count, 4)
    return Layout("m", "fp8", 1, (k, s), (Space("kv", page_tokens, Cyclic(unit)),))


def test_equal_page_major_layouts_have_one_piece_per_page():
    leg = route(make(), make(at=1 << 30)).leg("kv")
    (piece,) = leg.page_pieces
    assert piece.nbytes.tolist() == [4 * 2 * 2 * 4 * 8]
    assert piece.base.tolist() == [[1 << 20], [1 << 30]]
    assert piece.linear


def test_equal_layer_major_layouts_have_one_linear_piece_per_tensor():
    leg = route(make(layer_major), make(layer_major, 1 << 30)).leg("kv")
    (piece,) = leg.pieces
    assert piece.linear
    assert piece.nbytes.tolist() == [2 * 8] * 8
    assert leg.page_pieces == ()


def test_tensors_that_only_touch_are_not_joined():
    one = [make(layer_major, at, pages=1, order="hnd") for at in (1 << 20, 1 << 30)]
    leg = route(*one).leg("kv")
    assert sorted(n for p in leg.page_pieces for n in p.nbytes) == [2 * 4 * 8] * 8, "one per tensor"


def test_a_route_names_both_ranks_and_the_common_spaces():
    path = route(make(rank=Rank(tp=1)), make(rank=Rank(pp=2)))
    assert (path.src_rank, path.dst_rank) == (Rank(tp=1), Rank(pp=2))
    assert path.spaces == ("kv",)
    assert not path.is_empty


def test_ranks_without_a_common_layer_or_head_have_an_empty_route():
    assert route(make(layer_ids=[0, 1]), make(layer_ids=[2])).is_empty
    empty = route(make(heads=(0, 1)), make(heads=(1, 2)))
    assert empty.is_empty
    assert empty.request_bytes(0, 100) == 0
    with pytest.raises(InputError, match="nothing in common"):
        empty.leg("kv")


def test_ranks_whose_deals_never_meet_have_an_empty_route():
    assert route(make(deal=Cyclic(4, 2, 0)), make(deal=Cyclic(4, 2, 1))).is_empty
    assert not route(make(deal=Cyclic(4, 2, 0)), make(deal=Cyclic(4, 4, 2))).is_empty


def test_a_space_that_the_source_does_not_declare_is_left_out():
    dst = make()
    swa = change(dst.tensors[0], space="swa", address=1 << 40)
    dst = change(dst, tensors=(*dst.tensors, swa), spaces=(*dst.spaces, Space("swa", 4)))
    assert route(make(), dst).spaces == ("kv",)


def test_layouts_that_do_not_agree_are_refused_in_the_words_of_supports():
    with pytest.raises(LayoutError, match="dtype: prefill has 'bfloat16', decode has 'float16'"):
        route(make(), make(dtype="float16"))


def test_bytes_of_a_token_and_of_a_request():
    path = route(make(heads=(0, 1)), make())
    assert path.bytes_per_token("kv") == 4 * 2 * 8
    assert path.request_bytes(0, 100) == 100 * 64
    assert path.request_bytes(33, 100) == 67 * 64
    latent = [mla("m", layers=3, latent_dim=6, dtype="float16", pages=5, page_tokens=n) for n in (4, 16)]
    assert route(*latent).request_bytes(1, 18) == 17 * 36


def test_request_bytes_count_only_the_tokens_that_both_hold():
    path = route(make(deal=Ranges(2, (0,))), make(deal=Cyclic(1, 2, 1)))
    assert path.request_bytes(0, 10) == 2 * path.bytes_per_token("kv")


def test_a_granule_counts_whole_at_the_end_and_by_share_per_token():
    path = route(scaled(4, 4), scaled(4, 8))
    assert path.request_bytes(0, 17) == 17 * 8 + 5 * 3
    assert path.bytes_per_token("kv") == 9


def test_a_prefix_inside_a_granule_is_refused():
    path = route(scaled(4, 4), scaled(4, 8))
    with pytest.raises(InputError, match="token 6 is inside a granule of 4"):
        path.request_bytes(6, 17)
    with pytest.raises(InputError, match="inside a granule"):
        runs(path, Part("kv", 6, 17, PageList(np.arange(4)), PageList(np.arange(3))))
    assert path.request_bytes(17, 17) == 0, "nothing is cut where nothing is copied"


@pytest.mark.parametrize("numbers", [(-1, 4, 0), (5, 4, 0), (0, 1 << 40, 0), (0, 1, -1)])
def test_numbers_out_of_bounds_are_refused(numbers):
    prefix, num_tokens, rows = numbers
    with pytest.raises(InputError, match=f"prefix_tokens {prefix}, num_tokens {num_tokens}, rows {rows}"):
        route(make(), make()).request_bytes(prefix, num_tokens, {"kv": rows})


def test_a_route_can_be_narrowed_to_some_fields():
    whole = route(make(), make(at=1 << 30))
    assert whole.only(None) is whole
    assert whole.only({"kv": ("k", "v")}).leg("kv") is whole.leg("kv")
    keys = whole.only({"kv": ("k",)})
    assert keys is whole.only({"kv": ("k",)})
    assert 2 * keys.bytes_per_token("kv") == whole.bytes_per_token("kv")
    assert whole.request_bytes(0, 4, sends={"kv": ("v",)}) * 2 == whole.request_bytes(0, 4)
    assert whole.request_bytes(0, 4, sends={}) == 0
    with pytest.raises(InputError, match="field 'x' is not held by both ranks"):
        whole.only({"kv": ("k", "x")})
    with pytest.raises(InputError, match="space 'swa'"):
        whole.only({"swa": ("k",)})


def test_a_peer_whose_tensors_all_stride_otherwise_costs_no_more_time_than_they_are_many():
    """Each is a group of pieces of its own; what a peer declares is planned on the thread that serves all peers.

    Four times the tensors are held against the quarter of them, which no machine's pace changes: a look at all
    pieces for each group would make it sixteen times the work.
    """

    def held(count, padding):
        tensors = []
        for number in range(count):
            strides = Strides(64, 4 * (64 + padding * number), 16, 8)
            nbytes = strides.page * 2
            layers = tuple(range(4 * number, 4 * number + 4))
            tensors.append(Tensor("kv", layers, ((0, 2),), (Field("k", 8),), number << 24, nbytes, strides, 64, 2))
        return Layout("m", "bf16", 2, tuple(tensors), (Space("kv", 4),))

    def seconds(count):
        src, dst = held(count, 1), held(count, 0)
        before = time.process_time()
        assert len(route(src, dst).leg("kv").page_pieces) == count
        return time.process_time() - before

    assert min(seconds(4096) for _ in range(3)) < 9 * min(seconds(1024) for _ in range(3))
