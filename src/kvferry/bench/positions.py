"""Which tokens of a request a rank holds, and in which slots: written down anew, without the planner's arithmetic.

The planner finds segments by closed formulas; here every token is looked at, so that one does not repeat the other's
mistakes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.layout import All, Deal, Ranges, Slot, Space, Window

I64 = npt.NDArray[np.int64]


class Held(NamedTuple):
    """What a rank holds of a request in one space.

    Attributes:
        position: int64[N] tokens, ascending; 0 for the one slot of a state.
        slot: int64[N] the slot of each.
    """

    position: I64
    slot: I64


def held(space: Space, tokens: int) -> Held:
    """What a rank holds of a request of so many tokens.

    Raises:
        InputError: the space is made of rows, which a model's request does not have.
    """
    if isinstance(space.coverage, Slot):
        return Held(np.zeros(1, np.int64), np.zeros(1, np.int64))
    dealt = np.flatnonzero(_is_dealt(space.deal, tokens))
    kept = dealt >= first_kept(space, tokens)
    return Held(dealt[kept], np.arange(len(dealt), dtype=np.int64)[kept])


def first_kept(space: Space, tokens: int) -> int:
    """The first token that is kept at all: a window begins with the page that its first token lies on.

    Raises:
        InputError: as of `held`.
    """
    if isinstance(space.coverage, Window):
        tokens_before = max(0, tokens - space.coverage.tokens)
        return tokens_before // space.page_tokens * space.page_tokens
    if not isinstance(space.coverage, All | Slot):
        raise InputError(f"space {space.name} is made of rows, which nothing is known of")
    return 0


def page_count(space: Space, found: Held) -> int:
    """How many pages a list for it names."""
    return int(found.slot[-1] // space.page_tokens - first_page(space, found) + 1) if len(found.slot) else 0


def first_page(space: Space, found: Held) -> int:
    """Which page of the rank's slots its list begins with."""
    return int(found.slot[0] // space.page_tokens) if len(found.slot) else 0


def _is_dealt(deal: Deal, tokens: int) -> npt.NDArray[np.bool_]:
    """bool[tokens]: whether a token is this rank's."""
    unit = np.arange(tokens, dtype=np.int64) // deal.unit_tokens
    if not isinstance(deal, Ranges):
        mine: npt.NDArray[np.bool_] = unit % deal.ranks == deal.rank
        return mine
    units = -(-tokens // deal.unit_tokens)
    sizes = [units // deal.parts + (part < units % deal.parts) for part in range(deal.parts)]
    part_of_unit = np.repeat(np.arange(deal.parts), sizes)
    dealt: npt.NDArray[np.bool_] = np.isin(part_of_unit[unit], deal.owned)
    return dealt
