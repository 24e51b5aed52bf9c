"""Which pages a CP rank sends, by the names that SGLang's users know."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import filter_kv_indices_for_cp_rank, group_concurrent_contiguous, page_indices_to_cp_rank_page_indices
from kvferry.errors import InputError
from kvferry.layout import Ranges, Space, segments


def manager(rank, size):
    return SimpleNamespace(attn_cp_rank=rank, attn_cp_size=size)


def filtered(rank, size, pages, begin, end, total=None):
    found, where = filter_kv_indices_for_cp_rank(manager(rank, size), np.array(pages), slice(begin, end), total)
    return found.tolist(), (where.start, where.stop)


def test_the_first_ranks_have_one_page_more_where_pages_are_left_over():
    pages = np.array([40, 3, 17, 5, 9, 80, 2], np.int32)
    parts = [page_indices_to_cp_rank_page_indices(pages, 7, rank, 3).tolist() for rank in range(3)]
    assert parts == [[40, 3, 17], [5, 9], [80, 2]]
    assert page_indices_to_cp_rank_page_indices(pages, 7, 0, 1).tolist() == pages.tolist()
    assert [len(page_indices_to_cp_rank_page_indices(pages[:1], 1, rank, 3)) for rank in range(3)] == [1, 0, 0]


def test_a_chunk_is_cut_by_where_it_lies_in_the_request():
    chunk = [5, 9, 80]  # positions 3 to 5 of seven pages; rank 1 has the positions 3 and 4, rank 2 the others
    assert filtered(0, 3, chunk, 3, 6, 7) == ([], (3, 3))
    assert filtered(1, 3, chunk, 3, 6, 7) == ([5, 9], (3, 5))
    assert filtered(2, 3, chunk, 3, 6, 7) == ([80], (5, 6))
    assert filtered(0, 2, [1, 2, 3], None, None) == ([1, 2], (0, 2))
    assert filtered(0, 1, chunk, 3, 6, 7) == (chunk, (3, 6))


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 9))
def test_all_chunks_of_all_ranks_are_each_page_once(total, size, step):
    pages, sent = np.random.default_rng(total).permutation(200)[:total], []
    for rank in range(size):
        for at in range(0, total, step):
            chunk = slice(at, min(at + step, total))
            sent += filter_kv_indices_for_cp_rank(manager(rank, size), pages[chunk], chunk, total)[0].tolist()
    assert sent == pages.tolist()


@given(st.integers(1, 200), st.integers(1, 7), st.sampled_from([1, 4, 16]))
def test_the_parts_are_those_of_the_deal(tokens, size, page_tokens):
    total = -(-tokens // page_tokens)
    for rank in range(size):
        part = segments(Space(page_tokens=page_tokens, deal=Ranges(size, (rank,), page_tokens)), 0, tokens, tokens)
        held = sorted({token // page_tokens for token in range(tokens) if _holds(part, token)})
        assert page_indices_to_cp_rank_page_indices(np.arange(total), total, rank, size).tolist() == held


def _holds(part, token):
    return bool(((part.token <= token) & (token < part.token + part.length)).any())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: page_indices_to_cp_rank_page_indices(np.arange(3), 4, 0, 2), "3 page indices of a request of 4 pages"),
        (lambda: page_indices_to_cp_rank_page_indices(np.arange(3), 3, 2, 2), "CP rank 2 of 2"),
        (lambda: filtered(0, 2, [1, 2], 0, 3, 4), "chunk of 2 pages at slice"),
        (lambda: filtered(0, 2, [1, 2], 3, 5, 4), "of a request of 4 pages"),
        (lambda: filter_kv_indices_for_cp_rank(manager(0, 2), np.arange(2), slice(0, 4, 2), 4), "chunk of 2 pages"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_groups_of_concurrently_contiguous_pages_are_there_under_their_name():
    src, dst = group_concurrent_contiguous(np.array([1, 2, 3]), np.array([5, 6, 9]))
    assert [part.tolist() for part in src] == [[1, 2], [3]]
    assert [part.tolist() for part in dst] == [[5, 6], [9]]
