"""Prefill, greedy decode, and what makes two processes comparable to the bit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError
from kvferry.serve.cache import PagedCache, Pages
from kvferry.serve.model import Model

F32 = npt.NDArray[np.float32]

WORKER_ENV = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of every worker, to be set before numpy is imported: BLAS threads of two workers spin against
each other, and with some kernels the thread count changes the last bits of a product."""


def require_worker_env() -> None:
    """Check at a worker's start that it was launched with `WORKER_ENV`.

    Raises:
        ConfigError: a variable is missing or differs.
    """
    wrong = {name: os.environ.get(name) for name, value in WORKER_ENV.items() if os.environ.get(name) != value}
    if wrong:
        raise ConfigError(
            f"a worker's arithmetic runs on one BLAS thread, but its environment has {wrong}",
            hint="launch it with " + " ".join(f"{name}={value}" for name, value in WORKER_ENV.items()),
        )


def blas_fingerprint() -> str:
    """Digest of fixed products and functions of this process, with numpy's version.

    Two workers with equal fingerprints run the same kernels. With different ones the last bits of their
    logits differ, and only their tokens can be compared.
    """
    values = (np.arange(576 * 192, dtype=np.int64) * 40503 % 65521).astype(np.float32) / 65521 - np.float32(0.5)
    matrix = values.reshape(192, 576)
    results = [matrix @ matrix.T, matrix[:3] @ matrix.T, matrix[0] @ matrix.T, np.exp(values), values.sum()]
    digest = hashlib.blake2b(np.__version__.encode(), digest_size=16)
    for result in results:
        digest.update(result.tobytes())
    return digest.hexdigest()


class LogitsHash:
    """A running digest of logits, step by step: equal only if every bit of every step is equal.

    Attributes:
        steps: how many logit vectors went in.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def update(self, logits: F32) -> None:
        """Take in the float32[vocab] logits of the next step."""
        self._digest.update(logits.tobytes())
        self.steps += 1

    def hexdigest(self) -> str:
        """The digest of all steps so far."""
        return self._digest.hexdigest()


def prefill(model: Model, cache: PagedCache, pages: Pages, tokens: Sequence[int]) -> tuple[int, F32]:
    """Compute a whole prompt in one call.

    Args:
        model: the model.
        cache: where keys and values go.
        pages: int[P], the request's pages in logical order.
        tokens: the prompt.

    Returns:
        (first token of the answer, float32[vocab] logits that it was chosen from).

    Raises:
        InputError: as `Model.forward`.
    """
    logits = model.forward(tokens, 0, cache, pages)
    return int(logits.argmax()), logits


def greedy(
    model: Model,
    cache: PagedCache,
    pages: Pages,
    first_token: int,
    position: int,
    max_new_tokens: int,
    eos: Container[int] = (),
) -> Iterator[tuple[int, F32]]:
    """Decode one token at a time, the most likely each time.

    Args:
        model: the model.
        cache: holds the keys and values of all tokens before `position`.
        pages: int[P], the request's pages in logical order, enough for position + max_new_tokens tokens.
        first_token: the token at `position`, which prefill chose; it is not yielded again.
        position: number of tokens in the cache.
        max_new_tokens: the most tokens to yield.
        eos: tokens that end the answer; one of them is the last to be yielded, if any comes.

    Yields:
        (token, float32[vocab] logits that it was chosen from).

    Raises:
        InputError: as `Model.forward`.
    """
    token = first_token
    for step in range(max_new_tokens):
        if token in eos:
            return
        logits = model.forward([token], position + step, cache, pages)
        token = int(logits.argmax())
        yield token, logits
