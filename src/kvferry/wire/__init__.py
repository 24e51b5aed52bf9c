"""What is said: eight messages, one version, unknown fields tolerated. No I/O."""

from kvferry.wire.codec import decode, encode, pack_pages, unpack_pages
from kvferry.wire.messages import (
    FEATURES,
    MAJOR,
    MINOR,
    NEEDS_FEATURE,
    AnyMessage,
    Bye,
    Credits,
    Frame,
    Hello,
    InfoPhase,
    KVArgsRegisterInfo,
    Refused,
    StatusPhase,
    Tick,
    TransferInfo,
    TransferStatus,
)

__all__ = [
    "FEATURES",
    "MAJOR",
    "MINOR",
    "NEEDS_FEATURE",
    "AnyMessage",
    "Bye",
    "Credits",
    "Frame",
    "Hello",
    "InfoPhase",
    "KVArgsRegisterInfo",
    "Refused",
    "StatusPhase",
    "Tick",
    "TransferInfo",
    "TransferStatus",
    "decode",
    "encode",
    "pack_pages",
    "unpack_pages",
]
