"""What is said of a series of measured times. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
import numpy as np


class Times(msgspec.Struct, frozen=True):
    """A series of times in seconds.

    Attributes:
        median_s: half of them are not longer.
        best_decile_s: a tenth of them is not longer: what the code can do when nobody disturbs it.
        p99_s: one in a hundred is longer; with fewer than a hundred samples close to the longest.
        samples: how many there are.
    """

    median_s: float
    best_decile_s: float
    p99_s: float
    samples: int


def times_of(seconds: Sequence[float]) -> Times:
    """Sum up a series; percentiles are interpolated. Raises ValueError for an empty one."""
    if not seconds:
        raise ValueError("no time was measured")
    best, median, p99 = (float(value) for value in np.percentile(np.asarray(seconds, np.float64), (10, 50, 99)))
    return Times(median, best, p99, len(seconds))


def gb_per_s(nbytes: int, seconds: float) -> float:
    """10**9 bytes per second."""
    return nbytes / seconds / 1e9


def added_percent(base: Sequence[float], more: Sequence[float]) -> float:
    """How much longer `more` took than `base`, in percent: the median over the pairs of one round each.

    Raises:
        ValueError: the series are empty or of different length.
    """
    return 100 * (statistics.median(b / a for a, b in zip(base, more, strict=True)) - 1)
