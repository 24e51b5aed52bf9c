"""What an engine's `describe` gives and a peer's `attach` takes: one versioned record, checked when it comes."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec

from kvferry.engines.seam import MAX_BLOB_BYTES
from kvferry.errors import WireError


class Versioned(Protocol):
    """A record that says which version of itself it is."""

    @property
    def version(self) -> int:
        """Of this record."""
        ...


B = TypeVar("B", bound=Versioned)


class BlobCodec(Generic[B]):
    """Packs and unpacks one engine's record."""

    def __init__(self, engine: str, kind: type[B], version: int) -> None:
        """Remember the engine's name, the record's msgspec type, and the version that this side speaks."""
        self._engine, self._version = engine, version
        self._decoder = msgspec.msgpack.Decoder(kind)

    @staticmethod
    def encode(blob: B) -> bytes:
        """Pack a blob for the control plane."""
        return msgspec.msgpack.encode(blob)

    def decode(self, raw: bytes) -> B:
        """Unpack a peer's blob.

        Raises:
            WireError: it is too long, is not a blob of this engine, or has another version.
        """
        if len(raw) > MAX_BLOB_BYTES:
            raise WireError(f"the peer's {self._engine} engine blob has {len(raw)} bytes, more than {MAX_BLOB_BYTES}")
        try:
            blob = self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(
                f"{len(raw)} bytes are not a blob of the {self._engine} engine: {error}",
                hint=f"both sides must use engine {self._engine!r} and the same kvferry version",
            ) from error
        if blob.version != self._version:
            raise WireError(
                f"the peer's {self._engine} engine blob has version {blob.version}, this side speaks {self._version}",
                hint="use the same kvferry version on both sides",
            )
        return blob
