"""The float32 form of a model's weights, kept in one file that all workers of a machine map.

A worker then starts in a fraction of a second, and two workers share the pages. The file begins with a digest
of what it was made from; one that is cut off, or made from another state of its source, is written anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.serve.gguf_file import GgufFile

F32 = npt.NDArray[np.float32]
Pieces = Callable[[], Iterator[F32]]

_MAGIC = b"kvferry float32 weights, form 1\n"
_HEAD_BYTES = 64
_log = logging.getLogger(__name__)


def cached_floats(source: GgufFile, count: int, pieces: Pieces) -> F32:
    """The pieces, one after the other, as one flat read-only array that is mapped from the cache directory.

    Where the cache directory can't be used (no home, read-only, full) the array lies in private memory
    instead, and is writable.

    Args:
        source: the file that the pieces are made from.
        count: number of values in all pieces together.
        pieces: begins to make them, one at a time; not called if the cache holds them.

    Returns:
        float32[count].
    """
    try:
        return _through_cache(source, count, pieces)
    except OSError as error:
        _log.warning("%s: weights can't be cached, every start dequantises them: %s", source.path, error)
    return _joined(count, pieces)


def _joined(count: int, pieces: Pieces) -> F32:
    flat = np.empty(count, np.float32)
    at = 0
    for piece in pieces():
        flat[at : at + piece.size] = piece.ravel()
        at += piece.size
    return flat


def _through_cache(source: GgufFile, count: int, pieces: Pieces) -> F32:
    folder = _cache_folder()
    identity = hashlib.blake2b(str(source.path.resolve()).encode(), digest_size=4).hexdigest()
    file = folder / f"{source.path.stem}-{identity}.f32"
    head = _head(source)
    cached = _mapped(file, head, count)
    if cached is not None:
        return cached
    folder.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        # of two workers that start together the second waits here, and then maps what the first has written
        fcntl.flock(lock, fcntl.LOCK_EX)
        cached = _mapped(file, head, count)
        if cached is None:
            _write(file, head, pieces)
            cached = _mapped(file, head, count)
    if cached is None:
        raise OSError(f"{file} was changed while it was written")
    return cached


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise OSError(f"the cache directory {base!r} is not an absolute path")
    return Path(base) / "kvferry"


def _head(source: GgufFile) -> bytes:
    status = source.path.stat()
    digest = hashlib.blake2b(digest_size=_HEAD_BYTES - len(_MAGIC))
    digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    digest.update(source.content[: source.header_bytes])
    return _MAGIC + digest.digest()


def _mapped(file: Path, head: bytes, count: int) -> F32 | None:
    try:
        with file.open("rb") as cached:
            is_whole = os.fstat(cached.fileno()).st_size == len(head) + 4 * count
            if not is_whole or cached.read(len(head)) != head:
                return None
            return np.asarray(np.memmap(cached, np.float32, "r", offset=len(head)))
    except FileNotFoundError:
        return None


def _write(file: Path, head: bytes, pieces: Pieces) -> None:
    unfinished = file.with_suffix(".tmp")
    try:
        with unfinished.open("wb") as out:
            out.write(head)
            for piece in pieces():
                out.write(np.ascontiguousarray(piece).data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
