"""A room's facts as plain picklable data: a scheduler process decides, a worker process carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SendFacts:
    """What KVSender.from_facts needs; the fields are those of KVSender() and init()."""

    room: int
    num_kv_indices: int
    aux_index: int = -1
    first_token: int = 0
    num_tokens: int | None = None
    tag: int = 0
    bootstrap_addr: str | None = None


@dataclass(frozen=True)
class ReceiveFacts:
    """What KVReceiver.from_facts needs; the fields are those of KVReceiver(), init() and send_metadata()."""

    room: int
    kv_indices: list[int]
    aux_index: int | None = None
    state_indices: dict[str, list[int]] = field(default_factory=dict)
    decode_prefix_len: int = 0
    num_tokens: int | None = None
    tag: int = 0
    bootstrap_addr: str | None = None
    peers: tuple[str, ...] = ()
    prefill_dp_rank: int | None = None
