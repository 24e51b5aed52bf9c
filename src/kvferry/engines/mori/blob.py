"""What `describe` says: the library's descriptors of its engine and memory, and what shows who is there."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from kvferry.engines.blob_codec import BlobCodec
from kvferry.engines.host import Process
from kvferry.errors import WireError
from kvferry.ids import PeerId

VERSION = 1
NONCE_BYTES = 32

_Short = Annotated[str, msgspec.Meta(max_length=255)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Address = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class Described(msgspec.Struct, frozen=True, array_like=True):
    """A registered region.

    Attributes:
        address, nbytes: where it lies in its process.
        device: the accelerator's index there; -1 is host memory.
        descriptor: the library's own words for it, packed.
    """

    address: _Address
    nbytes: _Size
    device: int
    descriptor: bytes


class Blob(msgspec.Struct, frozen=True):
    """How to reach one engine of the library in one process.

    Attributes:
        version: of this record.
        backend: "rdma" or "xgmi".
        incarnation: of the process.
        engine: the library's descriptor of its engine, packed.
        memory: what may be written to.
        nonce: memory that holds the process's nonce; None by XGMI, which reads no host memory.
        nonce_digest: SHA-256 of the nonce.
        door: name of the Unix socket that the process listens on; "" by RDMA.
        process: which process it is, where the system says so.
        checksum: of all descriptors: the library reads them without checking.
        library: name and version of the distribution.
    """

    version: int
    backend: _Short
    incarnation: Annotated[int, msgspec.Meta(ge=0)]
    engine: bytes
    memory: list[Described]
    nonce: Described | None
    nonce_digest: bytes
    door: _Short
    process: Process | None
    checksum: _Digest
    library: _Short = ""

    def is_nonce(self, read: bytes) -> bool:
        """Whether these bytes are the process's nonce."""
        return hashlib.sha256(read).digest() == self.nonce_digest


_codec = BlobCodec("mori", Blob, VERSION)
encode = _codec.encode


def decode(raw: bytes, peer: PeerId, backend: str) -> Blob:
    """Unpack a peer's blob.

    Args:
        raw: what it said.
        peer: who it must be of.
        backend: what this side uses.

    Raises:
        WireError: it is no blob, is damaged, or of another process, or the other side uses another backend.
    """
    blob = _codec.decode(raw)
    if blob.incarnation != peer.incarnation:
        raise WireError(f"the blob is of process {blob.incarnation:016x}")
    if checksum_of(blob.engine, blob.memory, blob.nonce) != blob.checksum:
        raise WireError("the blob's descriptors were damaged on the way")
    if blob.backend != backend:
        raise WireError(
            f"it uses MORI's backend {blob.backend}, this side {backend}",
            hint="give both sides the same option 'backend' of the mori engine",
        )
    return blob


def checksum_of(engine: bytes, memory: list[Described], nonce: Described | None) -> bytes:
    """SHA-256 of all that is handed to the library."""
    return hashlib.sha256(msgspec.msgpack.encode((engine, memory, nonce))).digest()
