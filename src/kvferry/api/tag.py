"""Request tags: what keeps a re-used room number from joining two requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError


def request_tag(tokens: Sequence[int] | npt.NDArray[np.integer]) -> int:
    """A 64-bit hash of a request's token ids, never 0; both schedulers know the tokens, so both get the same.

    Raises:
        InputError: not a one-dimensional list of whole numbers.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(f"request_tag: {type(tokens).__name__} of {array.dtype} is no list of token ids")
    data = np.ascontiguousarray(array, dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1
