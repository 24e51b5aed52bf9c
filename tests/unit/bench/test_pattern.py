"""The bytes that are sent: every damage that a transfer can do to them is seen."""

import numpy as np
import pytest

from kvferry.bench.pattern import fill, first_difference

WORDS = 100_000  # more than three of the blocks that the pattern is made of
PAGE = 512


def filled(round_number, first_word=0, words=WORDS):
    array = np.zeros(words, np.uint64)
    fill(array, round_number, first_word)
    return array


@pytest.mark.parametrize("words", [0, 1, 32767, 32768, 32769, WORDS])
def test_what_was_written_is_found(words):
    assert first_difference(filled(5, 0, words), 5) == -1


def test_a_part_is_the_same_as_in_the_whole():
    whole = filled(3)
    assert np.array_equal(filled(3, 40_000, 1000), whole[40_000:41_000])
    assert first_difference(whole[777:60_000], 3, 777) == -1


def test_no_word_is_like_another_in_its_round():
    assert len(np.unique(filled(1))) == WORDS


def test_no_word_is_like_any_of_the_other_rounds():
    rounds = [filled(number, 0, 20_000) for number in range(20)]
    assert len(np.unique(np.concatenate(rounds))) == 20 * 20_000


@pytest.mark.parametrize("at", [0, 1, 32767, 32768, 65536, WORDS - 1])
@pytest.mark.parametrize("bit", [0, 7, 63])
def test_a_single_bit_is_seen_and_where_it_is(at, bit):
    words = filled(2)
    words[at] ^= np.uint64(1 << bit)
    assert first_difference(words, 2) == at


def test_a_page_of_an_earlier_round_is_seen():
    words = filled(9)
    words[PAGE : 2 * PAGE] = filled(8)[PAGE : 2 * PAGE]
    assert first_difference(words, 9) == PAGE


def test_two_pages_that_changed_places_are_seen():
    words = filled(4)
    pages = words.reshape(-1, 500)
    pages[[10, 11]] = pages[[11, 10]]
    assert first_difference(words, 4) == 5000


def test_large_round_numbers_stay_inside_64_bits():
    assert first_difference(filled((1 << 63) + 1, 1 << 40), (1 << 63) + 1, 1 << 40) == -1
