"""A batch on its way: one status object of the library for each pair of regions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvferry.engines.mori.native import Verdict, verdict_of

_BUSY_S = 0.001
"""How long it is looked at without a nap: a copy between GPUs takes less than going to sleep."""


class Flight:
    """The statuses, which the library writes into: they are kept until all are over."""

    def __init__(self, statuses: Sequence[Any], raised: Exception | None = None) -> None:
        """Remember what was begun, and what the library raised before all was."""
        self._statuses = list(statuses)
        self._raised = raised

    @property
    def over(self) -> bool:
        """Whether nothing of it is on its way any more."""
        return not any(status.InProgress() for status in self._statuses)

    def wait(self, until: float) -> bool:
        """Wait, at most until then on the monotonic clock; says whether it is over."""
        busy_until = time.monotonic() + _BUSY_S
        for status in self._statuses:
            while status.InProgress():
                now = time.monotonic()
                if now > until:
                    return False
                # by XGMI nothing wakes who waits, so it looks again after a millisecond at the latest
                status.WaitFor(0 if now < busy_until else 1)
        return True

    def verdict(self) -> Verdict:
        """How it ended, or that it has not."""
        codes = [str(status.Code().name) for status in self._statuses]
        messages = [status.Message() for status in self._statuses]
        if self._raised is None:
            return verdict_of(codes, messages)
        # nothing is begun after an exception: what has no state yet never will be on its way
        begun = verdict_of([*codes, "INIT"], [*messages, ""])
        return Verdict(begun.outcome, str(self._raised), type(self._raised).__name__)
