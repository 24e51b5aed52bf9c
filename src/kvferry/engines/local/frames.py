"""What goes over the local engine's two kinds of sockets, and the bounds that are checked first.

Unix socket (one msgpack message per packet): the writer knocks with a proof that it holds the blob (and, for
cross-memory attach, has read the target's nonce), is given a scratch word to write a value to, says that it has, is
handed the descriptors of the target's pools if it asked for shared memory, and is told yes or no. `Bye` promises that
the writer will write no more by this attachment.

TCP: the target says a CHALLENGE, new for each connection; the writer answers with an AUTH frame that holds a proof
made with it, never the token; a REPLY with the target's own proof follows, so that each side knows that the other
holds the blob. Then BATCH frames (header, dst[rows], nbytes[rows], payload), each answered by a REPLY with its
ticket. All numbers are little-endian.
"""

from __future__ import annotations

import hmac
import struct
from typing import Annotated, NamedTuple

import msgspec

from kvferry.errors import WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import Limits

MAX_PACKET_BYTES = 4096
MAX_TEXT_BYTES = 1000
MAX_FDS = 64
"""The most descriptors that one packet carries (the kernel takes 253), and the most parts."""
NO_DESCRIPTORS = "the peer's descriptors could not be received: the limit on open files is reached (ulimit -n)"

OK = 0
REFUSED = 1

_CHALLENGE = struct.Struct("<4s32s")
_AUTH = struct.Struct("<4sQQ16sI32s")
_BATCH = struct.Struct("<4sIQqQ")
_REPLY = struct.Struct("<4sHHQ")
CHALLENGE_BYTES = _CHALLENGE.size
AUTH_BYTES = _AUTH.size
BATCH_BYTES = _BATCH.size
REPLY_BYTES = _REPLY.size
NONCE_BYTES = 32
ATTACHMENT_BYTES = 16
_CHALLENGE_MAGIC = b"kfC1"
_AUTH_MAGIC = b"kfA2"
_BATCH_MAGIC = b"kfB1"
_REPLY_MAGIC = b"kfR1"


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    """Writer to target: who I am, a proof that I hold the blob (and can read memory), how I want to write."""

    peer: PeerId
    proof: bytes
    mechanism: str = "cma"


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Target to writer: write this value to this address of mine, or of the memfd that comes with it."""

    address: int
    value: bytes


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    """Writer to target: done."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A piece of the target's memory.

    Attributes:
        address: where it starts in the target.
        nbytes: its length.
        file: which of the packet's descriptors it lies in.
        offset: where it starts there.
    """

    address: _Natural
    nbytes: _Natural
    file: _Natural
    offset: _Natural


class Share(msgspec.Struct, frozen=True, tag="share"):
    """Target to writer: pieces of my memory, with the descriptors of the memfds that they lie in."""

    parts: list[Part]


class Yes(msgspec.Struct, frozen=True, tag="yes"):
    """Target to writer: the probe was seen; you may write."""


class No(msgspec.Struct, frozen=True, tag="no"):
    """Either way: refused."""

    reason: str


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """Writer to target: I write no more by this attachment."""


Packet = Knock | Probe | Probed | Share | Yes | No | Bye
_packets = msgspec.msgpack.Decoder(Packet)


class Caller(NamedTuple):
    """Who opens a TCP connection.

    Attributes:
        peer: the writer.
        attachment: 16 random bytes, the same for all connections of one attachment.
        number: 0 for the connection that begins the attachment, others for those that join it.
    """

    peer: PeerId
    attachment: bytes
    number: int


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


def knock_proof(token: bytes, nonce: bytes, peer: PeerId, mechanism: str) -> bytes:
    """What only a holder of the blob (who has read the nonce) can say, bound to who says it and what it wants."""
    return hmac.digest(token + nonce, f"kvferry attach {peer} {mechanism}".encode(), "sha256")


def encode_challenge(nonce: bytes) -> bytes:
    """The first frame of a TCP connection, from the target: 32 random bytes that the AUTH frame must answer."""
    return _CHALLENGE.pack(_CHALLENGE_MAGIC, nonce)


def is_challenge(raw: bytes | bytearray) -> bool:
    """Whether the bytes begin a CHALLENGE; a target that refuses at once says a REPLY instead."""
    return raw[:4] == _CHALLENGE_MAGIC


def decode_challenge(raw: bytes) -> bytes:
    """The nonce of a CHALLENGE, 32 bytes."""
    return bytes(_CHALLENGE.unpack(raw)[1])


def encode_auth(token: bytes, nonce: bytes, caller: Caller) -> bytes:
    """The writer's answer to a challenge: a proof that it holds the token, good for this nonce only."""
    peer = caller.peer
    proof = _proof(token, b"writer", nonce, caller)
    return _AUTH.pack(_AUTH_MAGIC, peer.incarnation, peer.epoch, caller.attachment, caller.number, proof)


def key_of(token: bytes, epoch: int) -> bytes:
    """The token that the peer of one connection is told; only the target can make it of its own one.

    A peer's epoch is the number of its connection, so each has another. Epoch 0 stands for no connection: who calls the
    engine without a node is told the target's own.
    """
    return hmac.digest(token, b"kvferry epoch %d" % epoch, "sha256") if epoch else token


def decode_auth(raw: bytes, token: bytes, nonce: bytes) -> Caller:
    """Who connects, at the target, whose own token it is given.

    Raises:
        WireError: the frame is none, or its proof is not made with this caller's key and this nonce.
    """
    magic, incarnation, epoch, attachment, number, proof = _AUTH.unpack(raw)
    caller = Caller(PeerId(incarnation, epoch), attachment, number)
    if magic != _AUTH_MAGIC or not hmac.compare_digest(proof, _proof(key_of(token, epoch), b"writer", nonce, caller)):
        raise WireError("the connection does not start with a proof that it holds this engine's token")
    return caller


def welcome(token: bytes, nonce: bytes, caller: Caller) -> str:
    """The target's own proof, as the text of its first OK: only who holds the token can say it to this caller."""
    return _proof(token, b"target", nonce, caller).hex()


def _proof(token: bytes, side: bytes, nonce: bytes, caller: Caller) -> bytes:
    peer = caller.peer
    said = struct.pack("<QQ16sI", peer.incarnation, peer.epoch, caller.attachment, caller.number)
    return hmac.digest(token, b"kvferry tcp " + side + nonce + said, "sha256")


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
