"""What is registered, asked and answered: one set of records for the registry, the server and the client.

The answers tolerate unknown fields (a newer minor version) and refuse missing ones by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import msgspec

from kvferry.errors import BootstrapError, ConfigError
from kvferry.ids import Incarnation, Rank

MAX_RANKS = 65536
"""The most ranks that one prefill grid may have."""
MAX_ENTRY_CHARS = 16384
"""The most text that one entry may hold: endpoint, digest, extra."""

_U64 = 2**64
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Za-z:.%]+\]|[0-9A-Za-z._-]+):([0-9]{1,5})", re.ASCII)
_WILDCARDS = ("0.0.0.0", "[::]")  # noqa: S104  they are refused, not bound
DEFAULT_TTL_S = 6.0
"""Seconds after which an entry is forgotten; so long does the successor of a killed rank wait for its place."""
RENEWALS_PER_TTL = 3.0  # two renewals may be lost before an entry expires


class RefusedError(BootstrapError):
    """The registry or its server said no; nothing was changed.

    Attributes:
        code: why, as a stable word: "bad_entry", "bad_sizes", "outside_grid", "sizes_differ", "conflict",
            "stale_epoch", "bad_room", "rooms_full", "bad_request", "too_large", "slow", "unauthorised",
            "not_found".
    """

    def __init__(self, message: str, *, code: str = "refused", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class ConflictError(RefusedError):
    """A rank is held by another live incarnation.

    Attributes:
        expires_s: seconds until that one's entry is forgotten, unless it is renewed.
    """

    def __init__(self, message: str, *, hint: str = "", expires_s: float = 0.0) -> None:
        super().__init__(message, code="conflict", hint=hint)
        self.expires_s = expires_s


class RankEntry(msgspec.Struct, frozen=True):
    """One prefill rank, as it registers itself and as decode ranks look it up.

    Attributes:
        rank: where it stands in the prefill grid; the key of the registration.
        sizes: the grid, as (dp_size, pp_size, cp_size, tp_size).
        endpoint: "tcp://host:port" of its control plane, as peers reach it.
        layout_digest: digest of its layout.
        incarnation: which process it is.
        epoch: which registration of that process it is; never goes back.
        load_balance: how rooms are dealt to DP ranks, where the prefill side has such a rule; "" if not.
        extra: whatever else the two sides agree to say.
    """

    rank: Rank
    sizes: Rank
    endpoint: str
    layout_digest: str
    incarnation: Incarnation
    epoch: int
    load_balance: str = ""
    extra: dict[str, str] = {}


class Topology(msgspec.Struct, frozen=True):
    """The prefill grid (or one DP rank of it) as it stands.

    Attributes:
        sizes: the grid; None while no rank is registered.
        entries: the live ranks, in rank order.
        missing: the ranks of the grid that are not registered, in rank order.
        generation: another number within one instance means that something changed.
        instance: which server said so.
    """

    sizes: Rank | None
    entries: tuple[RankEntry, ...]
    missing: tuple[Rank, ...]
    generation: int
    instance: str

    @property
    def complete(self) -> bool:
        """Whether every rank that was asked for is there."""
        return self.sizes is not None and not self.missing


class Registered(msgspec.Struct, frozen=True):
    """Answer to a registration; renew it well within ttl_s (see `renew_due`).

    Attributes:
        outcome: "added", "renewed" or "updated" (endpoint, epoch or another field is new).
        ttl_s: seconds after which the entry is forgotten unless it is renewed.
        generation: the registry's generation after it.
        instance: which server said so.
    """

    outcome: str
    ttl_s: float
    generation: int
    instance: str


class Unregistered(msgspec.Struct, frozen=True):
    """Answer to an unregistration; `removed` is false where that incarnation did not hold the rank."""

    removed: bool
    generation: int
    instance: str


class Readiness(msgspec.Struct, frozen=True):
    """Whether the whole grid is registered; `expected` is 0 while its sizes are not known."""

    ready: bool
    registered: int
    expected: int
    missing: tuple[Rank, ...]
    generation: int
    instance: str


class Health(msgspec.Struct, frozen=True):
    """The server process answers. It says nothing about any rank."""

    status: str
    instance: str


class Stored(msgspec.Struct, frozen=True):
    """How many rooms of a batch were put down: all of them."""

    stored: int
    instance: str


class Found(msgspec.Struct, frozen=True):
    """The DP rank of every asked room that is known; the others are absent."""

    rooms: dict[int, int]
    instance: str


class Failure(msgspec.Struct, frozen=True):
    """Body of every answer that is an error; with code "conflict", expires_s says when to try again."""

    error: str
    code: str
    instance: str
    hint: str = ""
    expires_s: float = 0.0


class RoomMap(msgspec.Struct, frozen=True):
    """Body of POST /rooms: room -> DP rank."""

    rooms: dict[int, int]


class RoomList(msgspec.Struct, frozen=True):
    """Body of POST /rooms/query."""

    rooms: tuple[int, ...]


class Holder(msgspec.Struct, frozen=True):
    """Body of DELETE /register."""

    rank: Rank
    incarnation: Incarnation


def renew_due(last_s: float | None, now_s: float, ttl_s: float) -> bool:
    """Whether an entry has to be renewed now, so that two lost renewals don't let it expire.

    Args:
        last_s: when the last renewal was sent; None if never.
        now_s: the time, on the same clock.
        ttl_s: what the server said in `Registered.ttl_s`.
    """
    return last_s is None or now_s - last_s >= ttl_s / RENEWALS_PER_TTL


def grid_ranks(sizes: Rank, dp: int | None = None) -> Iterator[Rank]:
    """Every rank of a grid (of one DP rank of it), in rank order, each once."""
    dps = range(sizes.dp) if dp is None else (dp,)
    return (Rank(*at) for at in product(dps, range(sizes.pp), range(sizes.cp), range(sizes.tp)))


def rank_count(sizes: Rank) -> int:
    """The number of ranks of a grid."""
    return sizes.dp * sizes.pp * sizes.cp * sizes.tp


def check_entry(entry: RankEntry) -> None:
    """Refuse an entry that contradicts itself.

    Raises:
        RefusedError: sizes out of bounds, rank outside of them, no usable endpoint, numbers or texts too big.
    """
    _check_grid(entry.rank, entry.sizes)
    _check_endpoint(entry)
    for name, value in (("incarnation", entry.incarnation), ("epoch", entry.epoch)):
        if not 0 <= value < _U64:
            raise RefusedError(
                f"prefill rank {entry.rank}: {name} {_short(value)} is not within 0 and 2**64 - 1",
                code="bad_entry",
                hint="send it as an unsigned 64-bit number",
            )
    texts = (entry.endpoint, entry.layout_digest, entry.load_balance, *entry.extra, *entry.extra.values())
    chars = sum(map(len, texts))
    if chars > MAX_ENTRY_CHARS:
        raise RefusedError(
            f"prefill rank {entry.rank}: its texts hold {chars} characters, more than {MAX_ENTRY_CHARS}",
            code="bad_entry",
            hint="put less into extra",
        )


def check_room(room: int) -> None:
    """Refuse a room number that is not an unsigned 64-bit number. Raises RefusedError."""
    if not 0 <= room < _U64:
        raise RefusedError(
            f"room {_short(room)} is not within 0 and 2**64 - 1",
            code="bad_room",
            hint="use the request's bootstrap room",
        )


def check_token(token: str | None) -> None:
    """Refuse a bearer token that a header can't carry. Raises ConfigError, which doesn't show the token."""
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise ConfigError(
            f"the bearer token ({len(token)} characters) is empty or has blanks or unprintable characters",
            hint="use printable ASCII, or None for no token",
        )


def _check_grid(rank: Rank, sizes: Rank) -> None:
    axes = msgspec.structs.astuple(sizes)
    if not all(1 <= size <= MAX_RANKS for size in axes) or rank_count(sizes) > MAX_RANKS:
        raise RefusedError(
            f"prefill sizes {_grid(sizes)}: each must be at least 1 and the product at most {MAX_RANKS}",
            code="bad_sizes",
            hint="send dp, pp, cp and tp sizes of the prefill side",
        )
    if not all(0 <= at < size for at, size in zip(msgspec.structs.astuple(rank), axes, strict=True)):
        raise RefusedError(
            f"prefill rank {_grid(rank)} lies outside of the sizes {sizes}",
            code="outside_grid",
            hint="ranks count from 0 to size - 1 on each axis",
        )


def _check_endpoint(entry: RankEntry) -> None:
    match = _ENDPOINT.fullmatch(entry.endpoint)
    if not match or not 0 < int(match.group(2)) < 65536:
        raise RefusedError(
            f"prefill rank {entry.rank}: endpoint {_short(entry.endpoint)} is not of the form tcp://host:port",
            code="bad_entry",
            hint="IPv6 literals stand in brackets, ports are 1 to 65535",
        )
    if match.group(1) in _WILDCARDS:
        raise RefusedError(
            f"prefill rank {entry.rank}: endpoint {entry.endpoint} is a wildcard: no peer can connect",
            code="bad_entry",
            hint="advertise the address at which decode ranks reach this host",
        )


def _grid(rank: Rank) -> str:
    return " ".join(f"{axis}{_short(at)}" for axis, at in msgspec.structs.asdict(rank).items())


def _short(value: int | str) -> str:
    """Show a value from outside, cut: it may be a megabyte long."""
    if isinstance(value, int) and abs(value) >= 2**128:
        return f"of {value.bit_length()} bits"  # str() of a huge int is slow, or refused
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
