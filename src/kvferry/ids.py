"""Identities and the few enumerations that every layer shares."""

from __future__ import annotations

import enum

import msgspec

Incarnation = int
"""A 64-bit number, new at every start of a process: what tells a restarted peer from the one before it."""


class PeerId(msgspec.Struct, frozen=True, order=True):
    """One registration epoch of one process; a new incarnation or a new epoch is a new peer."""

    incarnation: Incarnation
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.incarnation:016x}.{self.epoch}"


class Rank(msgspec.Struct, frozen=True, order=True):
    """Where a process stands in its side's parallel grid."""

    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return f"dp{self.dp} pp{self.pp} cp{self.cp} tp{self.tp}"


class LinkId(msgspec.Struct, frozen=True):
    """The identity of one hand-off: counters of the two processes that made them (ADR 0006)."""

    source: PeerId
    offer: int
    destination: PeerId
    claim: int


class Side(str, enum.Enum):
    """Which end of a hand-off."""

    PREFILL = "prefill"
    DECODE = "decode"


DisaggregationMode = Side
"""The name that schedulers know."""


class KVPoll(enum.IntEnum):
    """The state of a room as schedulers see it; ranks agree on a room by MIN."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4

    def __str__(self) -> str:
        return self.name
