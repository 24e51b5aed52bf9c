"""The exchange of snapshots on one link, seen from one end: revisions, acknowledgements, repetition."""

from __future__ import annotations


class Dialogue:
    """Who has seen what.

    A snapshot is sent when it changes (`publish`), and on ticks until it is acknowledged, with growing pauses. An
    acknowledgement travels in the other side's next snapshot; the debt is paid on a tick, never at once, so that two
    ends can't answer each other for ever.
    """

    __slots__ = ("acked", "changed", "owed", "pause_s", "repeat_at", "rev", "seen")

    def __init__(self) -> None:
        self.rev = 0
        self.acked = 0
        self.seen = 0
        self.owed = False
        self.changed = False
        self.repeat_at = 0.0
        self.pause_s = 0.0

    def publish(self) -> None:
        """The snapshot has changed."""
        self.rev += 1
        self.changed = True
        self.pause_s = 0.0

    def hear(self, rev: int, ack: int, want_ack: bool) -> bool:
        """Take the envelope of the other side's snapshot; say whether its content is news."""
        self.acked = max(self.acked, min(ack, self.rev))
        self.owed = self.owed or want_ack
        news = rev > self.seen
        self.seen = max(self.seen, rev)
        return news

    @property
    def settled(self) -> bool:
        """The other side has seen the latest snapshot."""
        return self.acked >= self.rev

    def due(self, now: float) -> bool:
        """Whether to send on this tick."""
        return self.owed or (not self.settled and now >= self.repeat_at)

    def sent(self, now: float, tick_s: float) -> None:
        """The snapshot went out; double the pause before it is repeated, up to ten ticks.

        The first pause leaves the other end a whole tick and the way there and back for its acknowledgement.
        """
        self.owed = self.changed = False
        self.pause_s = min(10 * tick_s, max(2.5 * tick_s, 2 * self.pause_s))
        self.repeat_at = now + self.pause_s
