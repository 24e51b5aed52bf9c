"""Page lists split into groups that are consecutive on both sides."""

import numpy as np
import pytest

from kvferry.api.page_lists import cp_rank_part, group_concurrent_contiguous
from kvferry.errors import InputError


def grouped(src, dst):
    groups = group_concurrent_contiguous(np.array(src, np.int32), np.array(dst, np.int32))
    return [[group.tolist() for group in side] for side in groups]


def test_lists_are_split_where_either_side_does_not_go_on():
    assert grouped([1, 2, 3, 7, 8], [4, 5, 9, 10, 11]) == [[[1, 2], [3], [7, 8]], [[4, 5], [9], [10, 11]]]


def test_consecutive_lists_are_one_group():
    assert grouped([5, 6, 7], [1, 2, 3]) == [[[5, 6, 7]], [[1, 2, 3]]]


def test_descending_pages_are_groups_of_one():
    assert grouped([3, 2], [1, 2]) == [[[3], [2]], [[1], [2]]]


def test_empty_lists_have_no_groups():
    assert grouped([], []) == [[], []]


def test_lists_of_different_length_are_refused():
    with pytest.raises(InputError, match="source has 1 pages, destination 2"):
        grouped([1], [1, 2])


def test_the_part_of_a_cp_rank_is_cut_as_its_deal_is():
    assert [cp_rank_part(7, rank, 3) for rank in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert cp_rank_part(1, 2, 3) == cp_rank_part(0, 0, 1) == (0, 0)
    with pytest.raises(InputError, match="CP rank 3 of 3, 1 pages"):
        cp_rank_part(1, 3, 3)
