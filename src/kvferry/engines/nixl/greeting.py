"""What writers tell their target: that they are about to write, and that they have written their last.

A writer that has read the target's nonce says `Hello` and reads the answer from the target's page, so that the target
needs no way back. It writes nothing to the pools before the answer is yes.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from kvferry.engines.host import Process
from kvferry.engines.nixl.agent import ANSWERS, NONCE_BYTES
from kvferry.ids import PeerId

NUMBER_BYTES = 16

_Number = Annotated[bytes, msgspec.Meta(min_length=NUMBER_BYTES, max_length=NUMBER_BYTES)]
_U64 = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """An attachment is about to write.

    Attributes:
        number: of the attachment, random; who knows it may end it.
        nonce: the target's, which only those know that can read its memory.
        incarnation: of the writer.
        epoch: of the connection that it writes for.
        process: whose end proves that nothing is written any more; None where that can't be said.
    """

    number: _Number
    nonce: bytes
    incarnation: _U64
    epoch: _U64
    process: Process | None

    @property
    def peer(self) -> PeerId:
        """Who writes, as the target knows it."""
        return PeerId(self.incarnation, self.epoch)


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """An attachment has written its last: all its batches are over, and none is begun any more."""

    number: _Number


_decoder = msgspec.msgpack.Decoder(Hello | Bye)


def pack(message: Hello | Bye) -> bytes:
    """As it is sent."""
    return msgspec.msgpack.encode(message)


def unpack(raw: bytes) -> Hello | Bye | None:
    """What was sent; None for what makes no sense."""
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def place_of(number: bytes) -> int:
    """Which of the page's answers is that to an attachment; another one may come to lie there."""
    return int.from_bytes(number[:4], "little") % ANSWERS


def answer_to(number: bytes, *, let_in: bool) -> bytes:
    """The answer, which fits no other attachment and can't be half of the one and half of the other."""
    digest = hashlib.sha256(number + (b"yes" if let_in else b"no")).digest()
    assert len(digest) == NONCE_BYTES
    return digest
