"""Bytes that tell where and when they were written: a counter times an odd number, with an offset per round.

A word of 8 bytes differs from every other word of its round, and from the words of all other rounds at any place,
so that an exchanged page, a half page and a page left over from an earlier round are all seen.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, odd: one word to the next."""
ROUND_STEP = 0xD1342543DE82EF95
"""From one round to the next."""
_MASK = (1 << 64) - 1
_BLOCK_WORDS = 1 << 15
_COUNTER: U64 = np.arange(_BLOCK_WORDS, dtype=np.uint64) * np.uint64(STEP)


def fill(words: U64, round_number: int, first_word: int = 0) -> None:
    """Write the round's pattern.

    Args:
        words: uint64[N], contiguous.
        round_number: which round.
        first_word: number of the first word in the whole that the pattern counts.
    """
    for begin in range(0, len(words), _BLOCK_WORDS):
        part = words[begin : begin + _BLOCK_WORDS]
        np.add(_COUNTER[: len(part)], word_at(round_number, first_word + begin), out=part)


def first_difference(words: U64, round_number: int, first_word: int = 0) -> int:
    """Index of the first word that is not the pattern's; -1 if all are. Arguments as of `fill`."""
    for begin in range(0, len(words), _BLOCK_WORDS):
        part = words[begin : begin + _BLOCK_WORDS]
        wrong = part != _COUNTER[: len(part)] + word_at(round_number, first_word + begin)
        if wrong.any():
            return begin + int(wrong.argmax())
    return -1


def word_at(round_number: int, word: int) -> np.uint64:
    """The word of a round that the pattern counts as number `word`."""
    value: np.uint64 = np.uint64((round_number * ROUND_STEP + word * STEP + 1) & _MASK)
    return value
