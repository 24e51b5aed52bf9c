"""What the writer's kinds of connection have in common."""

from __future__ import annotations

import enum
from typing import Protocol

from kvferry.engines.seam import Batch, Done, Ticket


class State(enum.Enum):
    """How far a link is."""

    OPENING = "opening"
    READY = "ready"
    LOST = "lost"


class Link(Protocol):
    """The writer's end of one attachment. No call waits; `step` does what can be done now.

    Attributes:
        mechanism: "shm", "cma" or "tcp".
        state: OPENING, then READY or LOST; LOST is final.
        why: why it is lost, in words.
        done: tickets that have ended; whoever reads them empties the list.
    """

    mechanism: str
    state: State
    why: str
    done: list[Done]

    def fileno(self) -> int:
        """The descriptor to wait on, or -1."""
        ...

    def wants_write(self) -> bool:
        """Whether it waits for the descriptor to become writable, too."""
        ...

    def step(self) -> None:
        """Go on as far as possible without waiting."""
        ...

    def submit(self, ticket: Ticket, batch: Batch) -> None:
        """Begin to write a batch that was checked; only when READY."""
        ...

    def close(self) -> None:
        """End it; tickets that are still open end. May be called twice."""
        ...
