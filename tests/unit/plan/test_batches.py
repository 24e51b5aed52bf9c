"""Batches: limits, splitting, coalescing, and arrays of their own."""

import msgspec
import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.layout import bind
from kvferry.plan import Limits, PageList, Part, batches, route, runs
from kvferry.presets import layer_major, mla, page_major

SHAPE = {"kv_heads": 2, "head_dim": 4, "dtype": "bfloat16", "page_tokens": 4, "pages": 64}
change = msgspec.structs.replace
ALL = Limits(1 << 20, 1 << 40)


def make(preset, at, layers=3, **rest):
    return bind(preset("m", layers=layers, **{**SHAPE, **rest}), [(at, 1 << 20)])


def expand(src, dst, src_pages, dst_pages, num_tokens, limits=ALL, **rest):
    path = route(src, dst)
    lists = [PageList(np.array(given, np.int32)) for given in (src_pages, dst_pages)]
    part = runs(path, Part("kv", 0, num_tokens, *lists))
    return list(batches(path, [part], limits, **rest))


def pair(preset, **rest):
    return make(preset, 1 << 20, **rest), make(preset, 1 << 30, **rest)


def test_a_whole_page_of_a_page_major_pool_is_one_row():
    (batch,) = expand(*pair(page_major), [5, 9, 3], [8, 1, 2], 12)
    assert batch.nbytes.tolist() == [3 * 2 * 64] * 3


def test_pages_that_follow_each_other_on_both_sides_are_one_row():
    (batch,) = expand(*pair(page_major), [5, 6, 7, 20], [1, 2, 3, 4], 16)
    assert batch.nbytes.tolist() == [3 * 3 * 2 * 64, 3 * 2 * 64]
    (batch,) = expand(*pair(layer_major), [5, 6, 7, 20], [1, 2, 3, 4], 16)
    assert batch.nbytes.tolist() == [3 * 64, 64] * 6
    (batch,) = expand(*pair(layer_major), [5, 6, 7], [1, 3, 4], 12)
    assert batch.nbytes.tolist() == [64, 128] * 6


def test_other_page_sizes_do_not_cut_rows_where_memory_goes_on():
    src, dst = make(layer_major, 1 << 20), make(layer_major, 1 << 30, page_tokens=16)
    (batch,) = expand(src, dst, [4, 5, 6, 7], [2], 16)
    assert batch.nbytes.tolist() == [16 * 16] * 6


def test_the_last_page_is_copied_up_to_the_last_token():
    (batch,) = expand(*pair(page_major, layers=1), [0, 9], [1, 3], 5)
    assert sorted(batch.nbytes.tolist()) == [8, 8, 8, 8, 128]
    assert batch.total_bytes == 160


def test_a_head_of_an_interleaved_token_is_a_row_per_token():
    src, dst = make(layer_major, 1 << 20, layers=1), make(layer_major, 1 << 30, layers=1, heads=(1, 2))
    (batch,) = expand(src, dst, [0], [0], 4)
    assert batch.nbytes.tolist() == [8] * 8
    assert np.diff(np.sort(batch.src.astype(np.int64))[:4]).tolist() == [16] * 3


def test_batches_keep_to_rows_and_bytes_and_fill_up():
    source, target = pair(mla_like, layers=61)
    pages = np.random.default_rng(0).permutation(64)
    whole = expand(source, target, pages, pages[::-1], 256)
    limits = Limits(rows=100, bytes=64 * 90)
    cut = expand(source, target, pages, pages[::-1], 256, limits, claim=7, chunk=3)
    assert all(len(b) == 90 and b.total_bytes == 64 * 90 for b in cut[:-1])
    few = expand(source, target, pages, pages[::-1], 256, Limits(rows=1000))
    assert [len(b) for b in few] == [1000, 1000, 1000, 904]
    assert {(b.claim, b.chunk) for b in cut} == {(7, 3)}
    for name in ("src", "dst", "nbytes"):
        joined = np.concatenate([getattr(b, name) for b in cut])
        assert joined.dtype == np.uint64
        assert (joined == getattr(whole[0], name)).all()


def mla_like(model, *, layers, kv_heads, head_dim, **rest):
    return mla(model, layers=layers, latent_dim=kv_heads * head_dim, **rest)


def test_batches_join_rows_of_several_spaces_and_pieces():
    source, target = pair(page_major, layers=2)
    path = route(source, target)
    lists = [PageList(np.array(given, np.int32)) for given in ([0, 2], [4, 1])]
    part = runs(path, Part("kv", 0, 6, *lists))
    (batch,) = batches(path, [part, part], ALL)
    assert batch.total_bytes == 2 * path.request_bytes(0, 6)


def test_a_row_longer_than_the_limit_is_split():
    out = expand(*pair(page_major), [0, 2], [1, 5], 8, Limits(rows=10, bytes=100))
    assert [b.nbytes.tolist() for b in out[:4]] == [[100], [100], [100], [84]]
    assert sum(b.total_bytes for b in out) == 2 * 384
    assert (out[1].src - out[0].src).tolist() == [100]


def test_pages_of_one_token_are_joined_whatever_their_token_stride():
    src, dst = pair(mla_like, page_tokens=1)
    tensors = [change(t, strides_bytes=change(t.strides_bytes, token=0)) for t in src.tensors]
    (batch,) = expand(change(src, tensors=tuple(tensors)), dst, [5, 6, 7], [1, 2, 3], 3)
    assert batch.nbytes.tolist() == [3 * 16] * 3


def test_no_runs_make_no_batches():
    assert expand(*pair(page_major), [], [], 0) == []
    assert expand(*pair(layer_major), [], [], 0) == []
    source, target = make(layer_major, 1 << 20), make(layer_major, 1 << 30, heads=(1, 2))
    assert expand(source, target, [], [], 0) == []
    assert list(batches(route(source, target), [], ALL)) == []


def test_a_batch_owns_its_arrays():
    out = expand(*pair(layer_major), [1, 3, 5, 7], [0, 2, 4, 6], 16, Limits(rows=5))
    before = [b.src.copy() for b in out]
    out[0].src[:] = 0
    assert all((b.src == old).all() for b, old in zip(out[1:], before[1:], strict=True))


@pytest.mark.parametrize("limits", [Limits(rows=0), Limits(bytes=0)])
def test_limits_that_admit_nothing_are_refused(limits):
    with pytest.raises(InputError, match="limits: rows"):
        expand(*pair(page_major), [0], [0], 4, limits)
