"""What the mover works on, and whom it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.engines.seam import Batch, Ticket
from kvferry.ids import PeerId


@dataclass
class Reports:
    """Whom the mover tells; each is called on the mover's thread and must only pass the news on."""

    progress: Callable[[int], None]
    landed: Callable[[int, int], None]
    failed: Callable[[int, str, bool], None]
    quiet: Callable[[int], None]
    attached: Callable[[PeerId, str], None]
    fenced: Callable[[PeerId, int | None], None]
    broken: Callable[[str], None]


@dataclass
class Job:
    """One chunk on its way to one peer."""

    number: int
    peer: PeerId
    batches: Callable[[], Iterator[Batch]]
    nbytes: int
    pending: Iterator[Batch] | None = None
    peeked: Batch | None = None
    out: dict[Ticket, int] = field(default_factory=dict)
    unproven: set[Ticket] = field(default_factory=set)
    landed_bytes: int = 0
    told_at: float = 0.0
    exhausted: bool = False
    cause: str = ""

    @property
    def over(self) -> bool:
        """Nothing more is submitted, and every ticket has ended one way or another."""
        return (self.exhausted or bool(self.cause)) and not self.out

    def peek(self) -> None:
        """Make the next batch, or find that there is none; raises what the plan raises."""
        if self.peeked is None:
            if self.pending is None:
                self.pending = self.batches()
            self.peeked = next(self.pending, None)
            self.exhausted = self.peeked is None
