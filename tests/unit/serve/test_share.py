"""A rank's share, against the oracle's dull list of where every element lies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import InputError
from kvferry.ids import Rank
from kvferry.layout import Cyclic, Field, Layout, Space, Strides, Tensor, bind
from kvferry.plan import PageList
from kvferry.presets import Grid, attention, layouts_of, mla
from kvferry.serve.grids import rank_layouts
from kvferry.serve.share import FIELDS, UNWRITTEN, Share
from kvferry.testing.oracle import cells

LAYERS, HEADS, DIM, FILL = 5, 3, 4, 0xEE
MODEL = attention("m", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float16")


class Ranks:
    """The pools of some ranks, with a request on scattered pages in each."""

    def __init__(self, layouts, num_tokens, seed=0):
        self.num_tokens = num_tokens
        self.pools, self.wheres, self.shares = [], [], []
        for number, layout in enumerate(layouts):
            pool = np.full(max(tensor.address + tensor.nbytes for tensor in layout.tensors), FILL, np.uint8)
            bound = bind(layout, [(pool.ctypes.data, pool.nbytes)])
            pages = np.random.default_rng(seed + number).permutation(layout.tensors[0].pages).astype(np.int32)
            self.pools.append(pool)
            self.wheres.append(cells(bound, {"kv": PageList(pages, 0)}, 0, num_tokens))
            self.shares.append(Share(bound, pool, pages, num_tokens))

    def place(self, rank, key):
        """The bytes of one element in a pool."""
        address, nbytes = self.wheres[rank][key]
        at = address - self.pools[rank].ctypes.data
        return self.pools[rank][at : at + nbytes]


def element(cache, key):
    """The bytes of one element of a logical cache."""
    _, layer, field, head, token = key
    return cache[layer, FIELDS.index(field), head, token].view(np.uint8)


def random_cache(num_tokens, seed=1):
    shape = (LAYERS, 2, HEADS, num_tokens, DIM)
    return np.random.default_rng(seed).integers(0, 0x7C00, shape, np.uint16).view(np.float16)


def empty_cache(num_tokens):
    return np.full((LAYERS, 2, HEADS, num_tokens, DIM), UNWRITTEN, np.uint16).view(np.float16)


@st.composite
def grids(draw):
    cp, dcp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (1, 3)]))
    return Grid(
        pp=draw(st.integers(1, 3)), cp=cp, dcp=dcp, tp=draw(st.integers(1, 5)), page=draw(st.sampled_from([1, 3, 8])),
        order=draw(st.sampled_from(["nhd", "hnd"])), arrange=draw(st.sampled_from(["layer", "block", "page"])),
        deal=draw(st.sampled_from(["contiguous", "token"] + ["zigzag", "page"] * (dcp == 1))),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(grids(), st.integers(1, 40), st.integers(0, 9))
def test_each_rank_stores_its_elements_where_the_layout_says_and_nothing_else(grid, num_tokens, seed):
    ranks, cache = Ranks(rank_layouts(MODEL, grid, num_tokens), num_tokens, seed), random_cache(num_tokens)
    whole = empty_cache(num_tokens)
    for rank, share in enumerate(ranks.shares):
        share.store(cache)
        assert share.stray_bytes(FILL) == 0
        expected = np.full_like(ranks.pools[rank], FILL)
        for key, (address, nbytes) in ranks.wheres[rank].items():
            at = address - ranks.pools[rank].ctypes.data
            expected[at : at + nbytes] = element(cache, key)
        np.testing.assert_array_equal(ranks.pools[rank], expected)
        assert share.nbytes == sum(nbytes for _, nbytes in ranks.wheres[rank].values())
        assert share.merge(whole) is None
        assert share.compare(cache) is None
    np.testing.assert_array_equal(whole, cache)


@settings(max_examples=60, deadline=None)
@given(grids(), st.integers(1, 40), st.data())
def test_one_flipped_byte_is_found_and_its_element_named(grid, num_tokens, data):
    ranks, cache = Ranks(rank_layouts(MODEL, grid, num_tokens), num_tokens), random_cache(num_tokens)
    rank = data.draw(st.sampled_from([rank for rank, where in enumerate(ranks.wheres) if where]))
    share = ranks.shares[rank]
    share.store(cache)
    key = data.draw(st.sampled_from(sorted(ranks.wheres[rank])))
    byte = data.draw(st.integers(0, 2 * DIM - 1))
    ranks.place(rank, key)[byte] ^= 0x10
    found = share.compare(cache)
    _, layer, field, head, token = key
    assert found[:5] == (layer, head, token, field, byte)
    assert found.here == found.there ^ 0x10
    assert share.stray_bytes(FILL) == 0
    before = cache.copy()
    assert share.merge(cache) == found  # as if another rank had written it first
    np.testing.assert_array_equal(cache, before)


@pytest.fixture
def one_rank():
    ranks = Ranks(layouts_of(MODEL, Grid(page=4), pages=4), 10)
    ranks.shares[0].store(random_cache(10))
    return ranks


def test_the_first_of_several_differences_is_named_in_words(one_rank):
    for token, layer in ((7, 2), (3, 4), (5, 2)):
        one_rank.place(0, ("kv", layer, "v", 1, token))[:] = 0xAA
    found = one_rank.shares[0].compare(random_cache(10))
    there = element(random_cache(10), ("kv", 2, "v", 1, 5))[0]
    assert str(found) == f"layer 2, head 1, token 5, v, byte 0: 0xaa is not {there:#04x}"


def test_exchanged_pages_heads_and_fields_differ():
    ranks, cache = Ranks(layouts_of(MODEL, Grid(page=4), pages=3), 12), random_cache(12)
    share = ranks.shares[0]
    for wrong in (np.roll(cache, 4, axis=3), cache[:, :, ::-1], cache[:, ::-1], cache[::-1]):
        share.store(np.ascontiguousarray(wrong))
        assert share.compare(cache) is not None
    share.store(cache)
    assert share.compare(cache) is None


def test_a_byte_behind_the_last_token_is_stray(one_rank):
    share, pool = one_rank.shares[0], one_rank.pools[0]
    held = np.zeros(len(pool), bool)
    for address, nbytes in one_rank.wheres[0].values():
        held[address - pool.ctypes.data :][:nbytes] = True
    pool[np.flatnonzero(~held)[[0, -1]]] = 0
    assert share.stray_bytes(FILL) == 2
    assert share.compare(random_cache(10)) is None


def test_fields_side_by_side_and_scattered_heads():
    fields = (Field("v", 2 * DIM), Field("k", 2 * DIM))
    tensor = Tensor(
        "kv", (4, 1), ((2, 3), (0, 1)), fields, 8, 6000, Strides(layer=1500, page=300, token=40, head=17), 300, 4
    )
    ranks = Ranks([Layout("m", "float16", HEADS, (tensor,), (Space("kv", 5, Cyclic(1, 2, 1)),), Rank(), DIM)], 33)
    cache = random_cache(33)
    assert len(ranks.wheres[0]) == 16 * 2 * 2 * 2
    ranks.shares[0].store(cache)
    for key in ranks.wheres[0]:
        np.testing.assert_array_equal(ranks.place(0, key), element(cache, key))


def test_what_has_no_place_in_a_logical_cache_is_refused(one_rank):
    latent = mla("m", layers=LAYERS, latent_dim=6, dtype="float16", pages=2, page_tokens=4)
    with pytest.raises(InputError, match="space 'kv', field 'latent' per token: a logical cache has k and v"):
        Ranks([latent], 3)
    with pytest.raises(InputError, match="elements of k have 8 bytes, the logical cache's have 16"):
        one_rank.shares[0].store(random_cache(10).repeat(2, axis=4))
    layout = layouts_of(MODEL, Grid(page=4), pages=4)[0]
    with pytest.raises(InputError, match="2 pages of 4 tokens, the share has 9 tokens"):
        Share(layout, one_rank.pools[0], np.arange(2), 9)
