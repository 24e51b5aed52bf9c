"""What goes over the local engine's two kinds of sockets, and the bounds that are checked first.

Unix socket (one msgpack message per packet): the writer knocks with a proof that it has read the target's
nonce, is given a scratch word to write a value to, says that it has, and is told yes or no. `Bye` promises
that the writer will write no more by this attachment.

TCP: an AUTH frame, answered by a REPLY; then BATCH frames (header, dst[rows], nbytes[rows], payload), each
answered by a REPLY with its ticket. All numbers are little-endian.
"""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

import msgspec

from kvferry.errors import WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import Limits

MAX_PACKET_BYTES = 4096
MAX_TEXT_BYTES = 1000

OK = 0
REFUSED = 1

_AUTH = struct.Struct("<4s32sQQ")
_BATCH = struct.Struct("<4sIQqQ")
_REPLY = struct.Struct("<4sHHQ")
AUTH_BYTES = _AUTH.size
BATCH_BYTES = _BATCH.size
REPLY_BYTES = _REPLY.size
_AUTH_MAGIC = b"kfA1"
_BATCH_MAGIC = b"kfB1"
_REPLY_MAGIC = b"kfR1"


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    """Writer to target: who I am, and a proof that I hold the blob and can read this process's memory."""

    peer: PeerId
    proof: bytes


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Target to writer: write this value to this address of mine."""

    address: int
    value: bytes


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    """Writer to target: done."""


class Yes(msgspec.Struct, frozen=True, tag="yes"):
    """Target to writer: the probe was seen; you may write."""


class No(msgspec.Struct, frozen=True, tag="no"):
    """Either way: refused."""

    reason: str


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """Writer to target: I write no more by this attachment."""


Packet = Knock | Probe | Probed | Yes | No | Bye
_packets = msgspec.msgpack.Decoder(Packet)


class BatchHeader(NamedTuple):
    """The head of a batch, in bounds."""

    rows: int
    ticket: int
    claim: int
    total_bytes: int


class Reply(NamedTuple):
    """The head of a reply; `text_bytes` of UTF-8 follow."""

    code: int
    text_bytes: int
    ticket: int


def encode_packet(packet: Packet) -> bytes:
    """Pack a message for the Unix socket."""
    return msgspec.msgpack.encode(packet)


def decode_packet(raw: bytes) -> Packet:
    """Unpack a message from the Unix socket; raises WireError."""
    try:
        return _packets.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{len(raw)} bytes are not a message of the local engine: {error}") from error


def knock_proof(token: bytes, nonce: bytes, peer: PeerId) -> bytes:
    """What only a holder of the blob who can read the target's memory can say, bound to who says it."""
    return hmac.digest(token + nonce, f"kvferry attach {peer}".encode(), "sha256")


def encode_auth(token: bytes, me: PeerId) -> bytes:
    """The first frame of a TCP connection."""
    return _AUTH.pack(_AUTH_MAGIC, token, me.incarnation, me.epoch)


def decode_auth(raw: bytes, token: bytes) -> PeerId:
    """Who connects; raises WireError when the frame or its token is wrong."""
    magic, shown, incarnation, epoch = _AUTH.unpack(raw)
    if magic != _AUTH_MAGIC or not hmac.compare_digest(shown, token):
        raise WireError("the connection does not start with this engine's token")
    return PeerId(incarnation, epoch)


def encode_batch(rows: int, ticket: int, claim: int, total_bytes: int) -> bytes:
    """The head of a batch."""
    return _BATCH.pack(_BATCH_MAGIC, rows, ticket, claim, total_bytes)


def decode_batch(raw: bytes, limits: Limits) -> BatchHeader:
    """The head of a batch; raises WireError when it claims more than the limits."""
    magic, rows, ticket, claim, total_bytes = _BATCH.unpack(raw)
    if magic != _BATCH_MAGIC:
        raise WireError(f"a batch starts with {magic!r}, not {_BATCH_MAGIC!r}")
    if not 0 < rows <= limits.rows or not 0 < total_bytes <= limits.bytes:
        raise WireError(
            f"a batch claims {rows} rows and {total_bytes} bytes; the limits are {limits.rows} and {limits.bytes}"
        )
    return BatchHeader(rows, ticket, claim, total_bytes)


def encode_reply(code: int, ticket: int = 0, text: str = "") -> bytes:
    """A reply with its text, cut at 1000 bytes."""
    raw = text.encode()[:MAX_TEXT_BYTES]
    return _REPLY.pack(_REPLY_MAGIC, code, len(raw), ticket) + raw


def decode_reply(raw: bytes) -> Reply:
    """The head of a reply; raises WireError."""
    magic, code, text_bytes, ticket = _REPLY.unpack(raw)
    if magic != _REPLY_MAGIC or code not in (OK, REFUSED) or text_bytes > MAX_TEXT_BYTES:
        raise WireError(f"{raw!r} is not the head of a reply")
    return Reply(code, text_bytes, ticket)
