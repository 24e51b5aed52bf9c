"""The forward pass of a Llama-family model in numpy, with keys and values in a paged cache.

Attention reads every key and value back from the cache, those of the tokens just computed too: the rounding
to the cache's dtype is then the same for prefill and decode, and a decode worker that was handed the same
bytes computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.serve.cache import PagedCache, Pages
from kvferry.serve.weights import LayerWeights, Weights

F32 = npt.NDArray[np.float32]


class Model:
    """A model ready to compute; it holds no state between calls, the cache holds all of it."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.config = weights.config
        half = self.config.head_dim // 2
        self._frequencies = self.config.rope_theta ** (-np.arange(half) / half)
        if self.config.rope_factors:
            self._frequencies /= self.config.rope_factors

    def forward(self, tokens: Sequence[int], start: int, cache: PagedCache, pages: Pages) -> F32:
        """Compute consecutive tokens of one request and store their keys and values.

        Equal calls (same tokens, start and cached bytes) give equal bits. The same tokens cut into other
        calls do not: sums of another length round otherwise. Scores take heads * tokens * positions floats.

        Args:
            tokens: the token ids: a prompt, a chunk of one, or the one token of a decode step.
            start: position in the request of the first of them; the cache holds what lies before.
            cache: holds all layers and KV heads of the model.
            pages: int[P], the request's pages in logical order.

        Returns:
            float32[vocab], the logits after the last token.

        Raises:
            InputError: no token, one outside the vocabulary, a position outside the context or the pages, or
                a cache that is not of this model's shape.
        """
        self._check(tokens, start, cache)
        angles = np.arange(start, start + len(tokens))[:, None] * self._frequencies
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        x = self.weights.embedding[np.asarray(tokens)]
        for number, layer in enumerate(self.weights.layers):
            q, k, v = self._project(layer, self._norm(x, layer.attention_norm))
            cache.write(number, pages, start, _rotate(k, cos, sin), v)
            keys, values = cache.gather(number, pages, start + len(tokens))
            x = x + _attend(_rotate(q, cos, sin), keys, values, start) @ layer.attention_out.T
            x = x + _feed_forward(layer, self._norm(x, layer.mlp_norm))
        logits: F32 = self._norm(x[-1], self.weights.norm) @ self.weights.lm_head.T
        return logits

    def _project(self, layer: LayerWeights, x: F32) -> tuple[F32, F32, F32]:
        """Queries, keys and values, each [heads, tokens, head_dim]."""
        config = self.config
        by_head = (x @ layer.qkv.T).reshape(len(x), -1, config.head_dim).swapaxes(0, 1)
        first_v = config.heads + config.kv_heads
        return by_head[: config.heads], by_head[config.heads : first_v], by_head[first_v:]

    def _norm(self, x: F32, weight: F32) -> F32:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: F32 = x / np.sqrt(mean_square + np.float32(self.config.rms_eps)) * weight
        return normed

    def _check(self, tokens: Sequence[int], start: int, cache: PagedCache) -> None:
        config, end = self.config, start + len(tokens)
        if len(tokens) == 0 or not 0 <= min(tokens) <= max(tokens) < config.vocab:
            raise InputError(f"token ids {list(tokens)[:8]}: one or more in [0, {config.vocab}) are needed")
        if start < 0 or end > config.context_tokens:
            raise InputError(
                f"positions [{start}, {end}) exceed the model's context of {config.context_tokens} tokens",
                hint="shorten the prompt or ask for fewer new tokens",
            )
        held = (cache.layers, cache.heads, cache.block.shape[-1])
        needed = (range(config.layers), range(config.kv_heads), config.head_dim)
        if held != needed:
            raise InputError(
                f"the cache holds layers, KV heads and head_dim {held}, the model {config.name} has {needed}"
            )


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Rotary positions over the pairs (i, i + head_dim / 2)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(q: F32, keys: F32, values: F32, start: int) -> F32:
    """Causal attention; consecutive query heads share a KV head.

    Args:
        q: [heads, tokens, head_dim].
        keys: [KV heads, start + tokens, head_dim].
        values: the same.
        start: position of the first query.

    Returns:
        [tokens, heads * head_dim].
    """
    heads, tokens, head_dim = q.shape
    grouped = (q * np.float32(head_dim**-0.5)).reshape(len(keys), -1, head_dim)
    scores = (grouped @ keys.swapaxes(1, 2)).reshape(heads, tokens, -1)
    if tokens > 1:
        scores += np.triu(np.full(scores.shape[1:], -np.inf, np.float32), start + 1)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = scores.reshape(len(keys), -1, scores.shape[-1]) @ values
    by_token: F32 = mixed.reshape(heads, tokens, head_dim).swapaxes(0, 1).reshape(tokens, -1)
    return by_token


def _feed_forward(layer: LayerWeights, x: F32) -> F32:
    """SwiGLU."""
    both = x @ layer.gate_up.T
    gate, up = both[..., : len(layer.gate_up) // 2], both[..., len(layer.gate_up) // 2 :]
    with np.errstate(over="ignore"):  # exp of a large -gate is inf, and gate / inf the right 0
        hidden = gate / (1 + np.exp(-gate)) * up
    out: F32 = hidden @ layer.down.T
    return out
