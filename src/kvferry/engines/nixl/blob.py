"""What `describe` says: the agent's name and metadata, its memory, and where a peer can tell it by."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from kvferry.engines.blob_codec import BlobCodec
from kvferry.engines.host import Process
from kvferry.engines.seam import MAX_BLOB_BYTES, Region
from kvferry.errors import EngineError, WireError
from kvferry.ids import PeerId

VERSION = 2

_Address = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Blob(msgspec.Struct, frozen=True):
    """How to reach one process's NIXL agent.

    Attributes:
        version: of this record.
        incarnation: the process's.
        name: the agent's, unique to each start of an engine.
        backend: the plug-in that it has.
        metadata: what its library says of it.
        digest: SHA-256 of the metadata: the library may end the process that loads a damaged one.
        page: where it keeps its nonce, and room for a peer's first write.
        nonce_digest: SHA-256 of the nonce.
        answers: where it answers those that want to write; 0 if it does not want to be asked.
        process: where it runs, so that its end can be seen on the same host; None where the system does not say.
        regions: (address, bytes, device) of what it has registered.
    """

    version: int
    incarnation: int
    name: Annotated[str, msgspec.Meta(max_length=100)]
    backend: Annotated[str, msgspec.Meta(max_length=100)]
    metadata: bytes
    digest: _Digest
    page: _Address
    nonce_digest: _Digest
    answers: _Address
    process: Process | None
    regions: list[tuple[_Address, _Address, int]]

    def memory(self) -> list[Region]:
        """The regions."""
        return [Region(address, nbytes, device) for address, nbytes, device in self.regions]


_codec = BlobCodec("nixl", Blob, VERSION)


def encode(blob: Blob) -> bytes:
    """Pack a blob for the control plane.

    Raises:
        EngineError: it is too long: too much memory in too many pieces is registered.
    """
    raw = _codec.encode(blob)
    if len(raw) > MAX_BLOB_BYTES:
        raise EngineError(
            f"what peers must know of {len(blob.regions)} registered regions takes {len(raw)} bytes, more than "
            f"{MAX_BLOB_BYTES}",
            hint="let the tensors lie in fewer, larger pools",
        )
    return raw


def decode(raw: bytes, peer: PeerId, backend: str) -> Blob:
    """Unpack a peer's blob.

    Raises:
        WireError: it is too long, is not a blob, was damaged, has another version or backend, or is another process's.
    """
    blob = _codec.decode(raw)
    problem = _why_not(blob, peer, backend)
    if problem:
        raise WireError(problem)
    return blob


def _why_not(blob: Blob, peer: PeerId, backend: str) -> str:
    if blob.incarnation != peer.incarnation:
        return f"the NIXL blob is that of process {blob.incarnation:016x}, not of {peer}"
    if blob.backend != backend:
        return f"the peer uses the NIXL backend {blob.backend!r}, this side {backend!r}"
    if hashlib.sha256(blob.metadata).digest() != blob.digest:
        return "the NIXL metadata in the peer's blob is damaged"
    return ""
