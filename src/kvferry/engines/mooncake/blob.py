"""What `describe` says: the session that peers write to, and what proves that the right process answers there."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from kvferry.errors import WireError

VERSION = 1
MAX_BLOB_BYTES = 64 << 10
NONCE_BYTES = 32

_Short = Annotated[str, msgspec.Meta(max_length=255)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Blob(msgspec.Struct, frozen=True):
    """How to reach one process's Mooncake engine.

    Attributes:
        version: of this record.
        session: host:port, as the library wants it.
        incarnation: of the process.
        nonce_address: where in the process its nonce lies, registered.
        nonce_digest: SHA-256 of the nonce.
        data_ports: where its data connections arrive; more than one if that is not certain.
        transport: what the library uses there.
        library: name and version of the distribution.
    """

    version: int
    session: _Short
    incarnation: Annotated[int, msgspec.Meta(ge=0)]
    nonce_address: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    nonce_digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    data_ports: Annotated[list[_Port], msgspec.Meta(max_length=64)]
    transport: _Short
    library: _Short = ""

    def is_nonce(self, read: bytes) -> bool:
        """Whether these bytes are the process's nonce."""
        return hashlib.sha256(read).digest() == self.nonce_digest


_decoder = msgspec.msgpack.Decoder(Blob)


def encode(blob: Blob) -> bytes:
    """Pack a blob for the control plane."""
    return msgspec.msgpack.encode(blob)


def decode(raw: bytes) -> Blob:
    """Unpack a peer's blob.

    Raises:
        WireError: it is too long, is not a blob, or has another version.
    """
    if len(raw) > MAX_BLOB_BYTES:
        raise WireError(f"the peer's mooncake engine blob has {len(raw)} bytes, more than {MAX_BLOB_BYTES}")
    try:
        blob = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            f"{len(raw)} bytes are not a blob of the mooncake engine: {error}",
            hint="both sides must use engine 'mooncake' and the same kvferry version",
        ) from error
    if blob.version != VERSION:
        raise WireError(
            f"the peer's mooncake engine blob has version {blob.version}, this side speaks {VERSION}",
            hint="use the same kvferry version on both sides",
        )
    return blob
