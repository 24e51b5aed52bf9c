"""Mistakes that connectors have made, each as a patch of one entry of the real rules.

The simulator must catch every one of them; a rule whose removal nothing notices is not tested.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvferry.proto import rules
from kvferry.proto.rules import CLAIM, ClaimEvent, ClaimState, PeerState, Row
from kvferry.wire import StatusPhase

_free_at_limit = {
    **CLAIM,
    (ClaimState.DRAINING, ClaimEvent.DRAIN_LIMIT): Row(ClaimState.QUIET, ("release",)),
}

MISTAKES: dict[str, tuple[str, Any]] = {
    "lost heartbeat taken as proof": ("PROVES_QUIET", rules.PROVES_QUIET | {PeerState.LOST}),
    "free at the drain limit": ("CLAIM", _free_at_limit),
    "quiet counted in any phase": ("QUIET_COUNTS_IN", frozenset(StatusPhase)),
    "no request tag": ("MATCHED", tuple(name for name in rules.MATCHED if name != "tag")),
    "closed claims forgotten": ("REMEMBER_CLOSED", False),
    "a lost incarnation may speak": ("MAY_SPEAK", rules.MAY_SPEAK | {PeerState.LOST}),
    "pruned before acked": ("PRUNE_UNACKED", True),
    "refusal forgotten": ("REMEMBER_REFUSED", False),
}
"""Mistake -> (name in proto.rules, what it is patched to)."""


@contextlib.contextmanager
def planted(mistake: str) -> Iterator[None]:
    """Run with one mistake planted in the real rules.

    Args:
        mistake: a key of MISTAKES; "" plants nothing.
    """
    if not mistake:
        yield
        return
    name, value = MISTAKES[mistake]
    original = getattr(rules, name)
    if isinstance(value, dict):  # tables are bound by name elsewhere: change them in place
        saved = dict(original)
        original.update(value)
        try:
            yield
        finally:
            original.update(saved)
        return
    setattr(rules, name, value)
    try:
        yield
    finally:
        setattr(rules, name, original)
