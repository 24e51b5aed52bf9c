"""What `describe` says: the session that peers write to, and what proves that the right process answers there."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from kvferry.engines.blob_codec import BlobCodec
from kvferry.errors import WireError
from kvferry.ids import PeerId

VERSION = 1
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


_codec = BlobCodec("mooncake", Blob, VERSION)
encode = _codec.encode


def decode(raw: bytes, peer: PeerId) -> Blob:
    """Unpack what a peer said; raises WireError where it is no blob, or of another process."""
    blob = _codec.decode(raw)
    if blob.incarnation != peer.incarnation:
        raise WireError(f"the blob is of process {blob.incarnation:016x}")
    return blob
