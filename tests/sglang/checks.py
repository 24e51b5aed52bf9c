"""What must be true of requests that went through both servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from byte_compare import differences
from client import Exchange, at_once, exchange
from models import Reference

if TYPE_CHECKING:
    from servers import Pair


def check(pair: Pair, done: Exchange) -> None:
    """Decode generated what transformers does, and held what prefill held."""
    assert done.is_right, str(done)
    wrong = differences(pair, done)
    assert not wrong, f"room {done.room}: {len(wrong)} differences, the first: {wrong[:4]}"


def check_in_turn(pair: Pair, references: Sequence[Reference], rounds: int) -> list[Exchange]:
    """Each request, one after another; the second round finds the first one's prefixes in the caches."""
    done = []
    for reference in [*references] * rounds:
        done.append(exchange(pair, reference))
        check(pair, done[-1])
    return done


def check_setup(pair: Pair, references: Sequence[Reference], *, slow: bool) -> list[Exchange]:
    """Requests in turn, then at once; few of them where ranks agree on each step on two cores."""
    rounds, count = (1, 2) if slow else (2, 8)
    return check_in_turn(pair, references, rounds) + check_at_once(pair, references, count)


def check_at_once(pair: Pair, references: Sequence[Reference], count: int) -> list[Exchange]:
    """Several requests at the same time."""
    chosen = [references[number % len(references)] for number in range(count)]
    done: list[Exchange] = at_once([lambda reference=reference: exchange(pair, reference) for reference in chosen])
    for each in done:
        check(pair, each)
    return done
