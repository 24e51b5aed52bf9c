"""Every error that kvferry raises, and the reason record that travels between peers.

An error says what, where, which side, both values and what to do: the message carries the first four, `hint`
the last. `code` is stable and used as a metric label. Each class also is the builtin that fits, so that callers
may catch either.
"""

from __future__ import annotations

import enum

import msgspec


class Code(str, enum.Enum):
    """Why a room failed. Stable: these are metric labels and part of wire version 1."""

    NO_CLAIM = "no_claim"
    REFUSED = "refused"
    PAGE_COUNT = "page_count"
    WRITE_FAILED = "write_failed"
    STALLED = "stalled"
    ABORTED = "aborted"
    PEER_LOST = "peer_lost"
    SHUTDOWN = "shutdown"
    UNREACHABLE = "unreachable"
    NO_BOOTSTRAP = "no_bootstrap"
    BOOTSTRAP_TIMEOUT = "bootstrap_timeout"
    HOLD_LIMIT = "hold_limit"
    INCOMPATIBLE = "incompatible"
    CONTENT_DIFFERS = "content_differs"
    BYTES_DIFFER = "bytes_differ"
    REREGISTERED = "reregistered"
    INTERNAL = "internal"


class Blame(str, enum.Enum):
    """Who has to look into it."""

    LOCAL = "local"
    PEER = "peer"
    ENGINE = "engine"
    CONFIG = "config"


class Reason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a room failed, as the first place that noticed said it; it reaches everyone who waits, unchanged.

    Attributes:
        code: the stable code.
        side: "prefill" or "decode": the side on which it was noticed.
        rank: the rank that noticed it, as text ("dp0 pp0 cp0 tp1").
        peer: the address or identity of the peer that it concerns, if any.
        stage: what was being done ("handshake", "waiting for claims", "transfer", ...).
        cause: what happened, in words, with both values where two differ.
        blame: who has to look into it.
    """

    code: Code
    side: str = ""
    rank: str = ""
    peer: str = ""
    stage: str = ""
    cause: str = ""
    blame: Blame = Blame.LOCAL

    def __str__(self) -> str:
        where = " ".join(part for part in (self.side, self.rank) if part)
        parts = [f"{self.code.value}: {self.cause}" if self.cause else self.code.value]
        if where:
            parts.append(f"noticed by {where}")
        if self.peer:
            parts.append(f"peer {self.peer}")
        if self.stage:
            parts.append(f"during {self.stage}")
        return "; ".join(parts)


MOST_WORDS = 4096
"""Characters of a cause."""


def in_words(thing: object) -> str:
    """What somebody gave as a cause, as text that can be sent: cut, and without what UTF-8 has no bytes for."""
    try:
        text = thing if isinstance(thing, str) else str(thing) or repr(thing)
    except Exception:  # noqa: BLE001 - an object of a caller's; that it can't be shown must not matter
        text = f"a {type(thing).__name__} that can't be shown"
    return text[:MOST_WORDS].encode("utf-8", "replace").decode()


class KvferryError(Exception):
    """The base of all errors; `hint` says what to do about it."""

    code = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message} ({hint})" if hint else message)


class ConfigError(KvferryError, ValueError):
    """A setting, address, layout or argument is wrong."""

    code = "config"


class InputError(ConfigError):
    """An argument of a scheduler's call is wrong: page indices, sizes, slots."""

    code = "input"


class LayoutError(ConfigError):
    """A declared layout contradicts itself or the memory that it names."""

    code = "layout"


class PoolError(KvferryError, MemoryError):
    """Memory for a pool can't be had, or the pool is closed."""

    code = "pool"


class UnknownEngine(ConfigError, LookupError):
    """No engine of that name is known."""

    code = "unknown_engine"


class EngineUnavailable(KvferryError, ImportError):
    """The engine is known but cannot be used here; the hint holds the install line or the reason."""

    code = "engine_unavailable"


class EngineError(KvferryError, RuntimeError):
    """An engine refused or failed in a way that concerns no single ticket."""

    code = "engine"


class AddressError(ConfigError, OSError):
    """An address or port cannot be bound, resolved or reached."""

    code = "address"


class BootstrapError(KvferryError, ConnectionError):
    """The bootstrap server did not answer, or refused."""

    code = "bootstrap"


class RoomInUse(KvferryError, ValueError):
    """A room number is used twice at once on one rank."""

    code = "room_in_use"


class ForkError(KvferryError, RuntimeError):
    """An object was used in a forked child; sockets, threads and registrations do not survive a fork."""

    code = "fork"


class ProtocolError(KvferryError, RuntimeError):
    """A local caller did something that the room tables do not allow."""

    code = "protocol"


class WireError(KvferryError, ValueError):
    """A frame does not parse, or breaks a limit. Counted and dropped by the node."""

    code = "wire"


class KVTransferError(KvferryError, RuntimeError):
    """A room failed. The name that schedulers know.

    Attributes:
        room: the room number.
        reason: the first cause, from whichever side and rank noticed it.
        is_from_another_rank: the cause was noticed elsewhere, not by this object's rank.
    """

    code = "transfer"

    def __init__(self, room: int, reason: Reason, *, is_from_another_rank: bool = False) -> None:
        self.room = room
        self.reason = reason
        self.is_from_another_rank = is_from_another_rank
        self.code = reason.code.value
        super().__init__(f"room {room} failed: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_transfer_error, (self.room, self.reason, self.is_from_another_rank))


def _transfer_error(room: int, reason: Reason, is_from_another_rank: bool) -> KVTransferError:
    return KVTransferError(room, reason, is_from_another_rank=is_from_another_rank)
