"""Small requests: what is kept by size, and when the general way must be asked."""

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.layout import Cyclic
from kvferry.plan import Size, recipe, route, small_batch, small_target
from kvferry.plan.recent import Recent
from kvferry.presets import layer_major, page_major


def make(page_tokens=4, pages=8, layers=1, **rest):
    return page_major(
        "m", layers=layers, kv_heads=1, head_dim=4, dtype="uint8", pages=pages, page_tokens=page_tokens, **rest
    )


def batch(path, src, dst, first=0, prefix=0, end=7):
    here, there = ({"kv": np.array(each, np.int64)} for each in (src, dst))
    target = small_target(path, {"kv": Size(first, prefix, end, 0)}, there)
    return target and small_batch(target, here, claim=3, chunk=2)


def test_a_whole_page_of_all_layers_is_one_row():
    found = batch(route(make(layers=5), make(layers=5)), [5], [2], end=4)
    assert (found.src.tolist(), found.dst.tolist(), found.nbytes.tolist()) == ([5 * 160], [2 * 160], [160])
    assert (found.claim, found.chunk, found.total_bytes) == (3, 2, 160)


def test_the_same_size_is_worked_out_once():
    leg = route(make(), make()).leg("kv")
    assert recipe(leg, Size(0, 0, 7, 0)) is recipe(leg, Size(0, 0, 7, 0))
    assert recipe(leg, Size(0, 0, 7, 0)) is not recipe(leg, Size(0, 0, 6, 0))


def test_a_prefix_begins_inside_of_the_lists():
    found = batch(route(make(), make()), [5, 6], [2], prefix=4)
    assert (found.src // 32).tolist() == [6] * len(found)
    assert (found.dst // 32).tolist() == [2] * len(found)
    assert found.total_bytes == 3 * 8


@pytest.mark.parametrize(("src", "dst"), [
    ([5], [1, 2]), ([5, 6], [1]), ([], [1, 2]), ([5, 8], [1, 2]), ([5, 6], [-1, 2]), ([5, 6], [1, 99]),
])  # fmt: skip
def test_pages_that_are_not_what_they_should_be_are_left_to_runs(src, dst):
    assert batch(route(make(), make()), src, dst) is None


def test_nothing_to_move_is_left_to_runs():
    path = route(make(), make())
    assert batch(path, [5, 6], [], prefix=7) is None
    assert small_target(path, {}, {}) is None
    assert batch(route(make(deal=Cyclic(4, 2, 1)), make()), [0], [0], end=3) is None


def test_requests_of_many_rows_are_left_to_runs():
    pages = list(range(300))[::-1]
    fine, coarse = (make(page_tokens=tokens, pages=300, layers=8) for tokens in (1, 4))
    path = route(fine, coarse)
    assert path.leg("kv").most_rows(0, 60, 60) == 60 * 8 * 2
    assert batch(path, pages, pages, end=60) is not None
    assert batch(path, pages, pages, end=70) is None
    assert path.leg("kv").most_rows(0, 1 << 20, 1 << 20) > 1024


RUN, MIXED = list(range(64)), list(range(0, 64, 2)) + list(range(1, 64, 2))


@pytest.mark.parametrize(("src", "dst"), [(RUN, RUN), (RUN, MIXED), (MIXED, RUN), (MIXED, MIXED)])
@pytest.mark.parametrize(("head_dim", "worth"), [(64, False), (4096, True)])
def test_rows_are_joined_where_pages_follow_each_other_on_both_sides_and_it_is_worth_it(src, dst, head_dim, worth):
    sides = [
        page_major("m", layers=1, kv_heads=1, head_dim=head_dim, dtype="uint8", pages=64, page_tokens=4)
        for _ in range(2)
    ]
    found = batch(route(*sides), src, dst, end=256)
    assert len(found) == (1 if worth and src is RUN is dst else 64)
    assert int(found.nbytes.sum()) == found.total_bytes == 256 * 2 * head_dim


def test_rows_of_each_layer_are_joined_and_what_is_left_of_a_page_is_a_row_s_end():
    layer_bytes, pages = 64 * 4 * 4096, [*range(10, 30), *range(40, 50)]
    sides = [
        layer_major("m", layers=2, kv_heads=1, head_dim=4096, dtype="uint8", pages=64, page_tokens=4)
        for _ in range(2)
    ]  # fmt: skip
    found = batch(route(*sides), pages, pages, end=4 * 29 + 1)
    assert found.nbytes.tolist() == [20 * 4 * 4096, (9 * 4 + 1) * 4096] * 4
    assert found.src.tolist() == [each * layer_bytes + page * 4 * 4096 for each in range(4) for page in (10, 40)]
    assert (found.src == found.dst).all()


def test_numbers_that_make_no_request_are_refused():
    with pytest.raises(InputError, match="num_tokens 3"):
        batch(route(make(), make()), [5], [1], prefix=4, end=3)


def test_large_requests_are_counted_without_their_pages():
    leg = route(make(page_tokens=1), make(page_tokens=1)).leg("kv")
    assert len(leg.overlap(0, 1 << 20, 1 << 20, few=True).tokens) == 1
    assert len(leg.overlap(0, 100, 100, few=True).tokens) == 100


def test_only_a_few_results_are_kept_and_only_small_ones():
    made = []

    def make_it(key):
        return lambda: made.append(key) or key

    recent = Recent(2)
    for key in (1, 2, 1, 3, 1, 2):
        assert recent.get(key, make_it(key), lambda _: True) == key
    assert made == [1, 2, 3, 1, 2], "the oldest goes first"
    made.clear()
    for _ in range(2):
        assert recent.get("nothing", lambda: made.append("nothing"), lambda _: True) is None
    assert made == ["nothing"], "that there is nothing is a result"
    made.clear()
    for _ in range(2):
        recent.get(9, make_it(9), lambda _: False)
    assert made == [9, 9]
