"""Runs: the union of both sides' cut points, and which page lists are refused."""

import msgspec
import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.layout import Cyclic, Space, Window
from kvferry.plan import PageList, Part, route, runs
from kvferry.presets import page_major


def make(page_tokens=4, pages=8, **rest):
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 4, "dtype": "uint8"}
    return page_major("m", **shape, pages=pages, page_tokens=page_tokens, **rest)


def pages(*indices, first_slot=0):
    return PageList(np.array(indices, np.int32), first_slot)


def rows_of(found):
    return list(zip(found.src_slot.tolist(), found.dst_slot.tolist(), found.tokens.tolist(), strict=True))


def test_equal_pages_make_one_run_per_page():
    found = runs(route(make(), make()), Part("kv", 0, 7, pages(5, 2), pages(1, 7)))
    assert rows_of(found) == [(20, 4, 4), (8, 28, 3)]
    assert found.space == "kv"
    assert all(column.dtype == np.int64 for column in found[1:])


def test_runs_are_cut_at_the_page_boundaries_of_both_sides():
    found = runs(route(make(4), make(6)), Part("kv", 0, 9, pages(0, 1, 2), pages(3, 1)))
    assert rows_of(found) == [(0, 18, 4), (4, 22, 2), (6, 6, 2), (8, 8, 1)]


def test_tokens_below_the_prefix_are_left_out_inside_the_first_page():
    found = runs(route(make(), make()), Part("kv", 5, 10, pages(0, 1, 2), pages(6, 7, first_slot=4)))
    assert rows_of(found) == [(5, 25, 3), (8, 28, 2)]


def test_a_chunk_of_the_source_sends_its_own_tokens_only():
    path, target = route(make(), make()), pages(3, 4, 5)
    first = runs(path, Part("kv", 0, 12, pages(0), target))
    second = runs(path, Part("kv", 0, 12, pages(1, 2, first_slot=4), target))
    assert rows_of(first) == [(0, 12, 4)]
    assert rows_of(second) == [(4, 16, 4), (8, 20, 4)]
    assert rows_of(runs(path, Part("kv", 0, 12, pages(), target))) == []


def test_a_prefix_that_is_the_whole_request_leaves_nothing():
    assert rows_of(runs(route(make(), make()), Part("kv", 7, 7, pages(0, 1), pages()))) == []


def test_a_rank_that_holds_none_of_the_tokens_sends_nothing():
    path = route(make(deal=Cyclic(4, 2, 1)), make())
    assert rows_of(runs(path, Part("kv", 0, 3, pages(), pages(0)))) == []
    path = route(make(), make(deal=Cyclic(4, 2, 1)))
    assert rows_of(runs(path, Part("kv", 0, 3, pages(0), pages()))) == []


def test_interleaved_tokens_meet_whole_pages_token_by_token():
    path = route(make(deal=Cyclic(1, 2, 1)), make())
    assert rows_of(runs(path, Part("kv", 0, 6, pages(0), pages(2, 3)))) == [(0, 9, 1), (1, 11, 1), (2, 13, 1)]


def test_a_window_starts_where_both_sides_keep_tokens():
    sides = []
    for page_tokens in (4, 16):
        space = Space("kv", page_tokens, Cyclic(), Window(9))
        sides.append(msgspec.structs.replace(make(page_tokens), spaces=(space,)))
    path = route(*sides)
    # the last 9 of 30 tokens start at 21: in page 5 of 4 tokens, in page 1 of 16 tokens
    found = runs(path, Part("kv", 0, 30, pages(0, 1, 2, first_slot=20), pages(3, first_slot=16)))
    assert rows_of(found) == [(0, 52, 4), (4, 56, 4), (8, 60, 2)]
    assert path.request_bytes(0, 30) == 10 * path.bytes_per_token("kv")
    assert path.request_bytes(25, 30) == 5 * path.bytes_per_token("kv")


@pytest.mark.parametrize(
    ("what", "src", "dst"),
    [
        ("decode page list of space 'kv' holds slots 0 to 7, .* needs slots 0 to 9", pages(0), pages(0, 1)),
        ("decode .* holds slots 4 to 15, .* needs slots 0 to 9", pages(0), pages(0, 1, 2, first_slot=4)),
        ("prefill page list .*: first_slot is 2", pages(0, first_slot=2), pages(0, 1, 2)),
        ("decode page list .*: first_slot is -4", pages(0), pages(0, 1, 2, first_slot=-4)),
        ("decode page list .*: pages 0 to 8, the pool has pages 0 to 7", pages(0), pages(0, 1, 8)),
        ("prefill page list .*: pages -1 to 0", pages(0, -1), pages(0, 1, 2)),
    ],
)  # fmt: skip
def test_a_wrong_page_list_is_refused_with_its_side(what, src, dst):
    with pytest.raises(InputError, match=what) as caught:
        runs(route(make(), make()), Part("kv", 0, 10, src, dst))
    assert caught.value.hint


def test_a_source_list_is_a_chunk_of_it_unless_it_is_whole():
    path = route(make(), make())
    assert rows_of(runs(path, Part("kv", 0, 10, pages(), pages(0, 1, 2)))) == []
    assert len(rows_of(runs(path, Part("kv", 0, 10, pages(0, 1, 2), pages(3, 4, 5), is_whole=True)))) == 3
    with pytest.raises(InputError, match="prefill page list of space 'kv' is empty, the request needs slots 0 to 9"):
        runs(path, Part("kv", 0, 10, pages(), pages(0, 1, 2), is_whole=True))
    with pytest.raises(InputError, match=r"prefill page list of space 'kv' holds slots 0 to 7, .* needs slots 0 to 9"):
        runs(path, Part("kv", 0, 10, pages(0, 1), pages(0, 1, 2), is_whole=True))


def test_a_hostile_number_of_tokens_is_refused_before_arrays_are_made():
    with pytest.raises(InputError, match="the request needs slots 0 to 16777215"):
        runs(route(make(), make()), Part("kv", 0, 1 << 24, pages(0), pages(0)))
