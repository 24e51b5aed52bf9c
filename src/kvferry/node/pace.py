"""How long the mover may sleep between two looks at its engine."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.engines.seam import Caps

PROOF_POLL_S = 0.05
"""How often the engine is asked while only fences or missing proofs are awaited."""

QUIET_POLL_S = 1.0
"""How often it is asked otherwise: peers that leave are noticed, and told that nothing more comes from here."""

SERVE_POLL_S = 0.001
"""How often an engine whose peers need it (caps NEEDS_TARGET_POLL) is asked while one may attach or write here."""

SERVE_IDLE_POLL_S = 0.03
"""How often such an engine is asked otherwise: a peer that connects anew comes unannounced, and needs a few of them."""


class Pace:
    """The mover's sleep, by what it waits for and what the engine can do."""

    def __init__(self, caps: Caps, is_written_to: Callable[[], bool]) -> None:
        """Remember what decides.

        Args:
            caps: of the opened engine.
            is_written_to: whether a peer may be attaching to this process, or writing to it; called on the thread.
        """
        self._serves = Caps.NEEDS_TARGET_POLL in caps
        self._is_written_to = is_written_to

    def pause_s(self, *, busy: bool, awaits_proof: bool) -> float:
        """Seconds to sleep, unless something is posted.

        Args:
            busy: batches are to be submitted, or outcomes are due.
            awaits_proof: tickets are open that may stay so for long.
        """
        if busy:
            return 0.0
        pause_s = PROOF_POLL_S if awaits_proof else QUIET_POLL_S
        if self._serves:
            pause_s = min(pause_s, SERVE_POLL_S if self._is_written_to() else SERVE_IDLE_POLL_S)
        return pause_s
