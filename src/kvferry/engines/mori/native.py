"""What the library's status codes mean: the one table from its codes to our outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.engines.seam import Outcome


class Meaning(NamedTuple):
    """A code in words, and what it proves."""

    outcome: Outcome
    words: str


MEANINGS = {
    "SUCCESS": Meaning(Outcome.LANDED, "it is done"),
    "INIT": Meaning(Outcome.FAILED_QUIET, "it was never begun"),
    "ERR_INVALID_ARGS": Meaning(Outcome.FAILED_QUIET, "the library does not take these rows"),
    "ERR_NOT_FOUND": Meaning(Outcome.FAILED_QUIET, "the library does not know the memory or the peer"),
    "ERR_BAD_STATE": Meaning(Outcome.FAILED_QUIET, "the library can't reach the peer's memory"),
    "ERR_RDMA_OP": Meaning(Outcome.FAILED_UNKNOWN, "the network device gave it up"),
    "ERR_GPU_OP": Meaning(Outcome.FAILED_UNKNOWN, "the GPU's copy failed"),
    "IN_PROGRESS": Meaning(Outcome.FAILED_UNKNOWN, "it was not over in time"),
}
"""The first four failures are told before anything is handed to a device."""

_ORDER = (Outcome.FAILED_UNKNOWN, Outcome.FAILED_QUIET, Outcome.LANDED)


class Verdict(NamedTuple):
    """How a batch ended."""

    outcome: Outcome
    cause: str
    native: str


def verdict_of(codes: Sequence[str], messages: Sequence[str]) -> Verdict:
    """What a batch's transfers say together: what may still land outweighs what failed, and that what landed.

    Args:
        codes: names of status codes, one for each transfer of the batch.
        messages: the library's words for each.
    """
    meanings = [MEANINGS.get(code, Meaning(Outcome.FAILED_UNKNOWN, "an unknown code")) for code in codes]
    outcome = next(each for each in _ORDER if any(meaning.outcome is each for meaning in meanings))
    if outcome is Outcome.LANDED:
        return Verdict(outcome, "", "")
    at = next(index for index, meaning in enumerate(meanings) if meaning.outcome is outcome)
    said = f": {messages[at]}" if messages[at] else ""
    return Verdict(outcome, f"{meanings[at].words}{said}", codes[at])
