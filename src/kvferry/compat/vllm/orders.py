"""What the scheduler half tells the worker half of each rank, once per step: plain data that travels in a pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.api import ReceiveFacts, SendFacts


@dataclass(frozen=True)
class Send:
    """A finished prefill: all its blocks at once."""

    facts: SendFacts
    kv_indices: list[int]
    state_indices: dict[str, list[int]]


@dataclass(frozen=True)
class Receive:
    """A prompt to load.

    Attributes:
        facts: the room and the blocks; None if it can't even be asked for.
        blocks: all blocks that are to be filled, of all groups.
        problem: why there are no facts.
    """

    facts: ReceiveFacts | None
    blocks: list[int]
    problem: str = ""


@dataclass(frozen=True)
class Orders:
    """By vLLM's request id; `aborts` are loads whose request has ended, `releases` rooms that nothing is wanted of."""

    sends: dict[str, Send] = field(default_factory=dict)
    receives: dict[str, Receive] = field(default_factory=dict)
    aborts: list[str] = field(default_factory=list)
    releases: list[ReceiveFacts] = field(default_factory=list)
