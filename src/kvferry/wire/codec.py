"""Bytes <-> frames, and page indices <-> bytes, with limits checked before anything is built."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import WireError
from kvferry.wire.messages import Frame

MAGIC = b"kvf1"
MAX_FRAME_BYTES = 64 << 20
"""Page lists of a 16 M page request fit; a larger frame is hostile or broken."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """Encode a frame: the magic and the msgpack of the frame."""
    return MAGIC + _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    """Decode a frame.

    Raises:
        WireError: not ours, too long, or not a frame of this version; says which.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(data)} bytes is above the limit of {MAX_FRAME_BYTES}")
    if data[:4] != MAGIC:
        raise WireError(f"frame begins with {bytes(data[:4])!r}, not {MAGIC!r}", hint="not a kvferry peer?")
    try:
        return _decoder.decode(memoryview(data)[4:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"frame of {len(data)} bytes does not parse: {error}") from None


def pack_pages(indices: npt.NDArray[np.integer]) -> bytes:
    """Page indices as raw little-endian int32."""
    return indices.astype("<i4", copy=False).tobytes()


_FEW_PAGES = 64


def _least(pages: npt.NDArray[np.int32]) -> int:
    return min(pages.tolist()) if len(pages) <= _FEW_PAGES else int(pages.min())  # of few numpy's call costs more


def unpack_pages(data: bytes) -> npt.NDArray[np.int32]:
    """The inverse of pack_pages, without a copy.

    Raises:
        WireError: the length is no multiple of 4, or an index is negative.
    """
    pages = view_pages(data)
    if len(pages) and (least := _least(pages)) < 0:
        raise WireError(f"page list holds the negative index {least}")
    return pages


def view_pages(data: bytes) -> npt.NDArray[np.int32]:
    """The same without a look at the numbers, for those who look themselves. Raises WireError for the length alone."""
    if len(data) % 4:
        raise WireError(f"page list of {len(data)} bytes is no whole number of int32")
    return np.frombuffer(data, "<i4")
