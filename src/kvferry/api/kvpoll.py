"""The words that schedulers use."""

from __future__ import annotations

import enum
from typing import NamedTuple

from kvferry.ids import DisaggregationMode, KVPoll

__all__ = ["DisaggregationMode", "KVClassType", "KVPoll", "KVTransferMetric"]


class KVClassType(enum.Enum):
    """What `get_kv_class` can be asked for."""

    KVARGS = "kvargs"
    MANAGER = "manager"
    SENDER = "sender"
    RECEIVER = "receiver"
    BOOTSTRAP_SERVER = "bootstrap_server"


class KVTransferMetric(NamedTuple):
    """Times and bytes of one room, as its own side saw them.

    Attributes:
        transfer_latency_s: from both page lists being known (decode: from send_metadata) to the end; None before.
        alloc_latency_s: from the start to the page list (decode) or to the first send (prefill); None before.
        transfer_total_bytes: bytes that have landed.
    """

    transfer_latency_s: float | None
    alloc_latency_s: float | None
    transfer_total_bytes: int
