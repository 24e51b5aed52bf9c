"""Wire version 1: the eight messages, as one tagged union. Integers are unsigned unless said.

A frame is (source identity, destination identity, message). Unknown fields are tolerated, missing ones take their
default, so that a newer minor version can add; a new *kind* of message goes only to a peer whose Hello names the
feature. Page indices travel as raw little-endian int32 bytes: 16,384 of them cost microseconds, as a list a
millisecond.
"""

from __future__ import annotations

import enum

import msgspec

from kvferry.errors import Reason
from kvferry.ids import PeerId
from kvferry.layout import Layout

MAJOR = 1
MINOR = 0
FEATURES: tuple[str, ...] = ()
"""Optional kinds of message that this build understands; none yet."""


class InfoPhase(str, enum.Enum):
    """What a claim tells its sources."""

    OPEN = "open"
    PAGES = "pages"
    CLOSED = "closed"


class StatusPhase(str, enum.Enum):
    """What a source tells a claim; the order of the members is the order of progress."""

    QUEUED = "queued"
    SENDING = "sending"
    DELIVERED = "delivered"
    FAILED = "failed"


class Message(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True):
    """Base of all messages."""


class Hello(Message, tag="hello", frozen=True):
    """First message of a connection, in both directions.

    Attributes:
        version: (major, minor); another major is refused, another minor is fine.
        features: optional kinds of message that the sender understands.
        peer: the sender's identity.
    """

    version: tuple[int, int]
    peer: PeerId
    features: tuple[str, ...] = ()


class KVArgsRegisterInfo(Message, tag="register", frozen=True):
    """A peer's layout and how its engines are reached.

    Attributes:
        layout: what the sender holds.
        engines: engine name -> what the engine's describe() said.
        side: "prefill" or "decode".
        aux_bytes: bytes of the metadata row, one number per buffer; both sides must agree.
        address: where the sender listens, for texts.
        digest: "off", "sample" or "full": the stronger wish of two peers is done; "" = its memory can't be read.
    """

    layout: Layout
    engines: dict[str, bytes]
    side: str
    aux_bytes: tuple[int, ...] = ()
    address: str = ""
    digest: str = ""


class Refused(Message, tag="refused", frozen=True):
    """The handshake failed; the reason is the same on both sides."""

    reason: Reason


class TransferInfo(Message, tag="info", frozen=True):
    """Claim to source: a snapshot of what the claim wants. A higher rev replaces a lower one.

    Attributes:
        room: the room number, by which a claim finds an offer.
        tag: request tag; 0 = none.
        claim: the claim's number at its process.
        rev: revision of this snapshot, from 1.
        ack: highest revision of the source's snapshots that the claim has seen.
        want_ack: the source is to send its snapshot on its next tick.
        phase: OPEN, PAGES or CLOSED.
        pages: per space, int32 page indices from the page of the first wanted token on.
        num_tokens: the request's tokens; None = not known here, whole pages count.
        prefix_tokens: tokens below this are here already and are never written.
        fan_in: how many claims the source's offer is to expect.
        sends: per space the fields that this source sends, replicas send the others; None: all that both hold.
        expected_bytes: bytes that the claim expects from this source; None = not known yet.
        success: with CLOSED: the claim has all it wanted.
        reason: with CLOSED and not success: why.
        trace: trace id, for logs.
    """

    room: int
    claim: int
    rev: int
    phase: InfoPhase
    tag: int = 0
    ack: int = 0
    want_ack: bool = False
    pages: dict[str, bytes] = {}
    num_tokens: int | None = None
    prefix_tokens: int = 0
    fan_in: int = 1
    sends: dict[str, tuple[str, ...]] | None = None
    expected_bytes: int | None = None
    success: bool = False
    reason: Reason | None = None
    trace: str = ""

    @property
    def elected(self) -> bool:
        """Whether the source sends anything."""
        return self.sends is None or bool(self.sends)


class Canary(msgspec.Struct, frozen=True, omit_defaults=True):
    """Digest of what was sent (see kvferry.canary).

    Attributes:
        full: of every byte, not of samples.
        sums: per space, uint64 sums as raw little-endian bytes: one per layer, and one per page of the destination.
    """

    sums: dict[str, tuple[bytes, bytes]]
    full: bool = False


class TransferStatus(Message, tag="status", frozen=True):
    """Source to claim: a snapshot of one link. A higher rev replaces a lower one.

    Attributes:
        room: the room number.
        claim: the claim's number at its process.
        offer: the offer's number at the source; 0 = the claim was refused before any offer.
        rev, ack, want_ack: as in TransferInfo.
        phase: QUEUED, SENDING, DELIVERED or FAILED.
        chunks_landed: chunks whose bytes have all landed.
        chunks_total: chunks handed to the engine so far; equal to chunks_landed while the source computes.
        bytes_landed: bytes landed on this link.
        quiet: nothing of this link can land any more; means something only in DELIVERED and FAILED.
        aux: the request's metadata row (first token and what travels with it), with DELIVERED.
        canary: digest of what was sent, with DELIVERED; None where none was taken.
        reason: with FAILED: why.
    """

    room: int
    claim: int
    rev: int
    phase: StatusPhase
    offer: int = 0
    ack: int = 0
    want_ack: bool = False
    chunks_landed: int = 0
    chunks_total: int = 0
    bytes_landed: int = 0
    quiet: bool = False
    aux: bytes = b""
    canary: Canary | None = None
    reason: Reason | None = None


class Credits(Message, tag="credits", frozen=True):
    """Staging snapshot; the tag is reserved and the message not sent before staging exists."""


class Tick(Message, tag="tick", frozen=True):
    """Book-keeping between two peers, at most once per heartbeat while either has something to forget.

    Attributes:
        seq: number of this tick; an older one is ignored.
        low_claim: every claim of the sender with a lower number is settled and will never speak again.
        live_offers: how many of the receiver's claims the sender still remembers.
        quiet_below: nothing of the sender's writes over links with a lower epoch can land any more (how pages come
            back after a connection was lost between two processes that both live).
        want_ack: the receiver is to answer on its next heartbeat.
    """

    seq: int
    low_claim: int = 0
    live_offers: int = 0
    quiet_below: int = 0
    want_ack: bool = False


class Bye(Message, tag="bye", frozen=True):
    """The sender leaves; it stops writing before it says so."""

    reason: Reason | None = None


AnyMessage = Hello | KVArgsRegisterInfo | Refused | TransferInfo | TransferStatus | Credits | Tick | Bye


NEEDS_FEATURE: dict[type, str] = {Credits: "credits"}
"""Kinds of message that a peer of this major version may not know: sent only where its Hello names the feature."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """What is on the wire: who, to whom, what."""

    source: PeerId
    destination: PeerId | None
    message: AnyMessage
