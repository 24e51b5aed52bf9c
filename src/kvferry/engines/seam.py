"""The seam between kvferry and a transfer engine: nine calls, capabilities, limits, outcomes.

An engine moves batches of (source address, destination address, length) rows to an attached peer and says of each
ticket whether its bytes have landed. No rule of the room protocol lives below this line; what the native library
calls session, agent, engine key or memory descriptor stays inside `describe` and `attach`.

All calls are made by one thread, the node's mover (with caps ANY_THREAD by one at a time); an engine may have threads
of its own. They are made by the process that opened the engine: in a forked child they are best refused with
`ForkError` (`close` then does nothing), and in no case disturb the parent. Two peers never share a ticket. What each
outcome proves is the subject of ADR 0004 and is shown for each engine by the engine suite.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvferry.ids import PeerId
from kvferry.plan.batch import U64, Batch, Limits

__all__ = [
    "MAX_BLOB_BYTES",
    "Batch",
    "Caps",
    "Done",
    "Engine",
    "EngineConfig",
    "Grants",
    "Limits",
    "Outcome",
    "Region",
    "Ticket",
]

Ticket = int

MAX_BLOB_BYTES = 64 << 10
"""What `describe` may say at most."""


class Outcome(enum.Enum):
    """How a ticket ended."""

    LANDED = "landed"
    """All bytes are visible at the target (attach: the peer can be written to; fence: nothing more can land)."""
    FAILED_QUIET = "failed_quiet"
    """It failed, and nothing of it can land any more."""
    FAILED_UNKNOWN = "failed_unknown"
    """It failed, and something of it may still land; a QUIET for the ticket may follow."""
    QUIET = "quiet"
    """A ticket that ended FAILED_UNKNOWN can't land anything any more."""


class Done(msgspec.Struct, frozen=True):
    """One ticket's outcome.

    Attributes:
        ticket: the ticket.
        outcome: how it ended.
        cause: what happened, in words, for a failure.
        native: the native code or errno, as text, for a failure.
    """

    ticket: Ticket
    outcome: Outcome
    cause: str = ""
    native: str = ""


class Caps(enum.Flag):
    """What an engine can do. Capability, not name, decides what runs."""

    NONE = 0
    DEVICE_MEMORY = enum.auto()
    """Can read and write accelerator memory."""
    FENCE = enum.auto()
    """`fence` can prove on the target's side that a peer can't write any more."""
    GRANTS = enum.auto()
    """The target checks rows against the grants where it writes them itself, so that a grant can be dropped. Peers
    that write its memory directly are trusted with all of it."""
    BLOCKING = enum.auto()
    """`submit` returns only when the copy has ended."""
    ANY_THREAD = enum.auto()
    """Any thread may make the calls, one at a time, and a `submit` of some 100 KiB takes microseconds."""
    NEEDS_TARGET_POLL = enum.auto()
    """The target's `poll` must be called while a peer attaches or writes."""


class Region(msgspec.Struct, frozen=True):
    """Memory to register: [address, address + nbytes)."""

    address: int
    nbytes: int
    device: int = -1
    """-1: host memory; otherwise the accelerator's index."""


class Grants(Protocol):
    """What peers may write here at the moment; thread-safe; kept by the node, read by engines with caps GRANTS."""

    def begin(self, peer: PeerId, claim: int, addresses: Sequence[int] | U64, lengths: Sequence[int] | U64) -> str:
        """Check rows against the grant and mark it in use.

        Returns:
            "" when every row lies inside the grant: `end` must follow; else why not (nothing is marked).
        """
        ...

    def end(self, peer: PeerId, claim: int) -> None:
        """The write that `begin` admitted is over."""
        ...

    def in_use(self, peer: PeerId, claim: int | None) -> bool:
        """Whether an admitted write of this claim (None: of any claim of this peer) is still running."""
        ...

    def drop(self, peer: PeerId, claim: int | None) -> None:
        """Admit no more writes for this claim (None: for any claim of this peer)."""
        ...


class EngineConfig(msgspec.Struct, frozen=True):
    """What an engine is opened with.

    Attributes:
        me: this process's identity; towards a peer it carries that peer's epoch, which is the connection's.
        bind_host: address to listen on, for engines with sockets of their own.
        advertise_host: address that peers should use.
        data_ports: (first, last) port to try; (0, 0) lets the system choose.
        grants: what peers may write here.
        options: engine-specific settings, as strings.
    """

    me: PeerId
    grants: Grants
    bind_host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    data_ports: tuple[int, int] = (0, 0)
    options: dict[str, str] = {}


class Engine(Protocol):
    """A transfer engine. The nine calls below are all there is."""

    name: str
    caps: Caps
    limits: Limits

    def open(self, config: EngineConfig) -> None:
        """Start; called once, before anything else. Raises EngineUnavailable or EngineError."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Replace the set of registered regions. Raises EngineError naming the region that can't be registered."""
        ...

    def describe(self) -> bytes:
        """Say in the engine's own words how peers reach this process; at most MAX_BLOB_BYTES, opaque to kvferry."""
        ...

    # An engine may have `personal(blob, epoch)` besides: what a blob becomes for the peer of one connection, for
    # instance with a secret of its own. It is called on any thread and changes nothing.

    def attach(self, peer: PeerId, blob: bytes) -> Ticket:
        """Begin to connect to a peer, given what its `describe` said. Attaching again replaces."""
        ...

    def submit(self, peer: PeerId, batch: Batch) -> Ticket:
        """Begin to write a batch to an attached peer. The batch's arrays stay untouched until the ticket ends."""
        ...

    def poll(self, budget_s: float) -> list[Done]:
        """Collect outcomes, waiting up to budget_s while none is there; 0 never waits."""
        ...

    def fence(self, peer: PeerId, claim: int | None = None) -> Ticket:
        """Ask for proof, on the target's side, that nothing of this peer (of this claim) can land any more.

        LANDED is the proof and may take for ever (a stopped process may go on). Without caps FENCE the ticket ends
        FAILED_QUIET at once, which proves nothing.
        """
        ...

    def detach(self, peer: PeerId) -> None:
        """Forget a peer and free what belongs to it; unknown peers are ignored."""
        ...

    def close(self) -> None:
        """Stop; ends threads, sockets and registrations. May be called twice."""
        ...
