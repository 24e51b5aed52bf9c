"""What `describe` says: where a process listens and what proves that the right one was reached."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.errors import WireError

VERSION = 1
MAX_BLOB_BYTES = 64 << 10
TOKEN_BYTES = 32

_Short = Annotated[str, msgspec.Meta(max_length=255)]
_Digest = Annotated[bytes, msgspec.Meta(max_length=32)]


class Blob(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to reach one process's local engine; what is empty or 0 isn't offered.

    Attributes:
        version: of this record.
        token: random, 32 bytes: whoever shows it was given this blob.
        host: boot id and namespaces; equal only where a pid means the same process.
        unix: abstract Unix socket, without the leading NUL byte.
        why_not_shared: why its memory can't be mapped by peers; "" if it can.
        nonce_address: where in the process its 32-byte nonce lies.
        nonce_digest: SHA-256 of the nonce.
        tcp_host: host name or address.
        tcp_port: TCP port.
    """

    version: int
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    host: _Short = ""
    unix: Annotated[str, msgspec.Meta(max_length=100)] = ""
    why_not_shared: _Short = ""
    nonce_address: Annotated[int, msgspec.Meta(ge=0)] = 0
    nonce_digest: _Digest = b""
    tcp_host: _Short = ""
    tcp_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0


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
        raise WireError(f"the peer's local engine blob has {len(raw)} bytes, more than {MAX_BLOB_BYTES}")
    try:
        blob = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            f"{len(raw)} bytes are not a blob of the local engine: {error}",
            hint="both sides must use engine 'local' and the same kvferry version",
        ) from error
    if blob.version != VERSION:
        raise WireError(
            f"the peer's local engine blob has version {blob.version}, this side speaks {VERSION}",
            hint="use the same kvferry version on both sides",
        )
    return blob
