"""What is made of a model file, kept in one file that all workers of a machine map: a record and float32 values.

A worker then starts in a fraction of a second, and two workers share the pages. The file begins with a digest
of what it was made from and of its own length; one that is cut off, or made from another state of its source,
is written anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Made = tuple[bytes, Callable[[], F32]]
"""The record, and what gives the float32[N] values."""
Make = Callable[[], tuple[bytes, Iterator[F32]]]
"""Reads the source, once: the record, and the values piece by piece, so that they are never held twice."""

# magic, digest, length of the record; then the values, aligned as BLAS likes them; then the record
_HEAD = struct.Struct("<32s24sQ")
_MAGIC = b"kvferry float32 model, form 2\n".ljust(32)
_SAMPLE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


def cached(source: Path, make: Make) -> Made:
    """What `make` makes of the source, from the cache directory if it is there; the values are read-only then.

    Where the cache directory can't be used (no home, read-only, full) the values are made in private memory
    when they are asked for, and are writable.

    Args:
        source: the file that it is made from.
        make: makes it; not called if the cache holds it.
    """
    try:
        return _through_cache(source, make)
    except OSError as error:
        _log.warning("%s: weights can't be cached, every start makes them anew: %s", source, error)
    record, pieces = make()
    return record, partial(_joined, pieces)


def _joined(pieces: Iterator[F32]) -> F32:
    values = bytearray()
    for piece in pieces:
        values += np.ascontiguousarray(piece).data
    return np.frombuffer(values, np.float32)


def _through_cache(source: Path, make: Make) -> Made:
    folder = _cache_folder()
    identity = hashlib.blake2b(str(source.resolve()).encode(), digest_size=4).hexdigest()
    file = folder / f"{source.stem}-{identity}.f32"
    key = _key(source)
    found = _mapped(file, key)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        # of two workers that start together the second waits here, and then maps what the first has written
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _mapped(file, key)
        if found is None:
            _write(file, key, make)
            found = _mapped(file, key)
    if found is None:
        raise OSError(f"{file} was changed while it was written")
    return found


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise OSError(f"the cache directory {base!r} is not an absolute path")
    return Path(base) / "kvferry"


def _key(source: Path) -> bytes:
    """Names one state of the source."""
    with source.open("rb") as file:
        status = os.fstat(file.fileno())
        return f"{status.st_size} {status.st_mtime_ns}\n".encode() + file.read(_SAMPLE_BYTES)


def _head(key: bytes, file_bytes: int, record_bytes: int) -> bytes:
    digest = hashlib.blake2b(key, digest_size=24)
    digest.update(f"{file_bytes} {record_bytes}".encode())
    return _HEAD.pack(_MAGIC, digest.digest(), record_bytes)


def _mapped(file: Path, key: bytes) -> Made | None:
    try:
        with file.open("rb") as opened:
            head, file_bytes = opened.read(_HEAD.size), os.fstat(opened.fileno()).st_size
            record_bytes = int.from_bytes(head[-8:], "little")
            if head != _head(key, file_bytes, record_bytes):
                return None
            count = (file_bytes - _HEAD.size - record_bytes) // 4
            values = np.asarray(np.memmap(opened, np.float32, "r", offset=_HEAD.size, shape=(count,)))
            opened.seek(-record_bytes, os.SEEK_END)
            return opened.read(), lambda: values
    except FileNotFoundError:
        return None


def _write(file: Path, key: bytes, make: Make) -> None:
    record, pieces = make()
    unfinished = file.with_suffix(".tmp")
    try:
        with unfinished.open("wb") as out:
            out.seek(_HEAD.size)
            for piece in pieces:
                out.write(np.ascontiguousarray(piece).data)
            out.write(record)
            file_bytes = out.tell()
            out.seek(0)
            out.write(_head(key, file_bytes, len(record)))
            out.flush()
            os.fsync(out.fileno())
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
