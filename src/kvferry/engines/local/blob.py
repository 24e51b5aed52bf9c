"""What `describe` says: where a process listens and what proves that the right one was reached."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.engines.blob_codec import BlobCodec

VERSION = 1
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


_codec = BlobCodec("local", Blob, VERSION)
encode, decode = _codec.encode, _codec.decode
