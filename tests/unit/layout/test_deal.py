"""Which tokens a rank holds, in which slots, on how many pages: compared with loops over tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.layout import (
    All,
    Cyclic,
    Ranges,
    Rows,
    Slot,
    Space,
    Window,
    extent,
    first_slot,
    num_pages,
    segments,
    slots_below,
)  # fmt: skip
from kvferry.layout.deal import can_meet, canonical
from kvferry.testing.oracle import covered_positions, held_positions, pages_of

cyclics = st.integers(1, 4).flatmap(
    lambda ranks: st.builds(Cyclic, st.integers(1, 9), st.just(ranks), st.integers(0, ranks - 1))
)
ranges = st.integers(1, 6).flatmap(
    lambda parts: st.builds(
        Ranges,
        st.just(parts),
        st.lists(st.integers(0, parts - 1), min_size=1, unique=True).map(tuple),
        st.integers(1, 9),
    )
)
deals = st.one_of(cyclics, ranges)
tokens = st.sampled_from([0, 1, 15, 16, 17, 130])


@settings(max_examples=200, deadline=None)
@given(deals, tokens, st.integers(0, 130), st.integers(0, 130))
def test_segments_name_the_same_tokens_and_slots_as_a_loop(deal, num_tokens, a, b):
    lo, hi = sorted((min(a, num_tokens), min(b, num_tokens)))
    space = Space("kv", 16, deal)
    parts = segments(space, lo, hi, num_tokens)
    pairs = [(t + i, s + i) for t, s, n in zip(*parts, strict=True) for i in range(n)]
    expected = [(t, s) for s, t in enumerate(held_positions(deal, num_tokens)) if lo <= t < hi]
    assert pairs == expected
    assert all(part.dtype == np.int64 for part in parts)


@settings(max_examples=200, deadline=None)
@given(deals, tokens, st.integers(0, 130), st.sampled_from([1, 3, 16]))
def test_first_slot_is_the_page_start_of_the_next_token_that_is_held(deal, num_tokens, token, page_tokens):
    token = min(token, num_tokens)
    held = held_positions(deal, num_tokens)
    slot = next((s for s, t in enumerate(held) if t >= token), len(held))
    space = Space("kv", page_tokens, deal)
    assert slots_below(space, token, num_tokens) == slot
    assert first_slot(space, token, num_tokens) == slot // page_tokens * page_tokens


@settings(max_examples=200, deadline=None)
@given(deals, tokens, st.integers(0, 130), st.sampled_from([All(), Window(8), Window(100)]))
def test_num_pages_counts_the_pages_that_a_loop_touches(deal, num_tokens, prefix, coverage):
    prefix = min(prefix, num_tokens)
    space = Space("kv", 16, deal, coverage)
    assert num_pages(space, prefix, num_tokens) == len(pages_of(space, prefix, num_tokens))


@pytest.mark.parametrize("coverage", [All(), Window(1), Window(8), Window(33), Window(1000)])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 130])
def test_extent_of_tokens_and_windows_is_that_of_a_loop(coverage, num_tokens):
    space = Space("kv", 16, Cyclic(), coverage)
    for prefix in (0, 1, num_tokens // 2, num_tokens):
        lo, hi = extent(space, prefix, num_tokens)
        assert list(range(lo, hi)) == covered_positions(space, prefix, num_tokens)


def test_extent_of_slots_and_rows_does_not_depend_on_tokens():
    assert extent(Space("ssm", 1, Cyclic(), Slot()), 130, 130) == (0, 1)
    assert extent(Space("index", 1, Cyclic(), Rows()), 5, 130, rows=7) == (0, 7)
    assert num_pages(Space("index", 1, Cyclic(), Rows()), 5, 130, rows=7) == 7


def test_neighbouring_parts_are_one_segment():
    parts = segments(Space("kv", 16, Ranges(4, (2, 1))), 0, 40, 40)
    assert (parts.token.tolist(), parts.slot.tolist(), parts.length.tolist()) == ([10], [0], [20])


def test_the_first_parts_get_the_units_that_are_left_over():
    parts = [segments(Space("kv", 4, Ranges(3, (r,), 4)), 0, 30, 30) for r in range(3)]
    assert [(p.token.tolist(), p.length.tolist()) for p in parts] == [([0], [12]), ([12], [12]), ([24], [6])]


def test_equal_deals_have_one_canonical_spelling():
    assert canonical(Ranges(2, (1, 0), 5)) == canonical(Cyclic(7)) == Cyclic()
    assert canonical(Ranges(4, (3, 0))) == Ranges(4, (0, 3))
    assert canonical(Cyclic(1, 2, 1)) == Cyclic(1, 2, 1)


def test_deals_can_meet_exactly_when_some_token_is_held_by_both():
    small = [Cyclic(u, n, r) for u in (1, 2, 3) for n in (1, 2, 4) for r in range(n)]
    for a, b in itertools.product(small, repeat=2):
        met = set(held_positions(a, 150)) & set(held_positions(b, 150))
        assert can_meet(a, b) == bool(met), (a, b)


def test_ranges_with_the_same_cuts_meet_in_common_parts_only():
    assert can_meet(Ranges(4, (0, 3)), Ranges(4, (3,)))
    assert not can_meet(Ranges(4, (0, 3)), Ranges(4, (1, 2)))
    assert can_meet(Ranges(4, (0,)), Ranges(2, (1,))), "not known without the length, so not excluded"
    assert can_meet(Ranges(4, (0,)), Cyclic(1, 2, 1))
