from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.serve.cache import PagedCache
from kvferry.serve.model import Model
from kvferry.serve.weights import Weights, load


def naive_logits(weights: Weights, tokens: list[int]) -> np.ndarray:
    """The model once more, as a straight line in float64: no cache, one head and one query at a time."""
    c = weights.config
    d, queries, keys = c.head_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim

    def norm(row, weight):
        return row / (np.mean(row**2) + c.rms_eps) ** 0.5 * weight

    def rotated(vector, position):
        frequencies = c.rope_theta ** (-2 * np.arange(d // 2) / d)
        stretched = [f / by for f, by in zip(frequencies, c.rope_factors or [1] * (d // 2), strict=True)]
        turn = np.exp(1j * position * np.array(stretched))
        pairs = (vector[: d // 2] + 1j * vector[d // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag])

    xs = [weights.embedding[t].astype(np.float64) for t in tokens]
    for layer in weights.layers:
        wq, wk, wv = layer.qkv[:queries], layer.qkv[queries : queries + keys], layer.qkv[queries + keys :]
        gate, up = layer.gate_up[: c.ffn], layer.gate_up[c.ffn :]
        normed = [norm(x, layer.attention_norm) for x in xs]
        q, k, v = ([w.astype(np.float64) @ x for x in normed] for w in (wq, wk, wv))
        for t in range(len(xs)):
            outs = []
            for head in range(c.heads):
                at = head // (c.heads // c.kv_heads) * d
                query = rotated(q[t][head * d : head * d + d], t)
                scores = [query @ rotated(k[s][at : at + d], s) / d**0.5 for s in range(t + 1)]
                weight = np.exp(np.array(scores) - max(scores))
                outs.append(sum(w * v[s][at : at + d] for s, w in enumerate(weight / weight.sum())))
            xs[t] = xs[t] + layer.attention_out.astype(np.float64) @ np.concatenate(outs)
        for t, x in enumerate(xs):
            h = norm(x, layer.mlp_norm)
            g = gate.astype(np.float64) @ h
            xs[t] = x + layer.down.astype(np.float64) @ (g / (1 + np.exp(-g)) * (up.astype(np.float64) @ h))
    return weights.lm_head.astype(np.float64) @ norm(xs[-1], weights.norm)


def test_logits_equal_a_naive_implementation_without_pages(tiny_model, tiny_weights, new_cache, tokens):
    cache = new_cache(dtype="float32")
    logits = tiny_model.forward(tokens, 0, cache, cache.allocate(3))
    expected = naive_logits(tiny_weights, tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)


def test_stretched_rotary_positions_of_a_file_are_computed(tiny_gguf, tiny_model, tiny_weights, new_cache, tokens):
    factors = np.array([1, 1.5, 4, 32], np.float32)
    stretched = Model(load(tiny_gguf(tensors={"rope_freqs.weight": factors})))
    assert stretched.config.rope_factors == (1, 1.5, 4, 32)
    config = dataclasses.replace(tiny_weights.config, rope_factors=stretched.config.rope_factors)
    expected = naive_logits(dataclasses.replace(tiny_weights, config=config), tokens)
    cache = new_cache(dtype="float32")
    logits, plain = (m.forward(tokens, 0, cache, cache.allocate(3)) for m in (stretched, tiny_model))
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
    assert np.abs(logits - plain).max() > 0.01


@pytest.mark.parametrize("chunk", [1, 5, 16, 42])
def test_a_prompt_in_chunks_gives_the_logits_of_one_call(tiny_model, new_cache, tokens, chunk):
    cache = new_cache(dtype="float32")
    whole = tiny_model.forward(tokens, 0, cache, cache.allocate(3))
    pages = cache.allocate(3)
    for start in range(0, len(tokens), chunk):
        logits = tiny_model.forward(tokens[start : start + chunk], start, cache, pages)
    np.testing.assert_allclose(logits, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_pages_give_the_same_bits(tiny_model, new_cache, tokens, dtype):
    cache = new_cache(dtype=dtype)
    first, second = cache.allocate(3), cache.allocate(3)
    cache.block[:] = 7  # what lies on unused rows must not matter
    one = tiny_model.forward(tokens, 0, cache, first)
    two = tiny_model.forward(tokens, 0, cache, second[::-1])
    assert one.tobytes() == two.tobytes()
    assert cache.read(first, len(tokens)).tobytes() == cache.read(second[::-1], len(tokens)).tobytes()


def test_moved_bytes_decode_to_the_same_bits_elsewhere(tiny_model, new_cache, tokens):
    here, there = new_cache(seed=1), new_cache(seed=2)
    source, target = here.allocate(3), there.allocate(3)
    tiny_model.forward(tokens[:-1], 0, here, source)
    there.block[target] = here.block[source]
    one = tiny_model.forward(tokens[-1:], len(tokens) - 1, here, source)
    two = tiny_model.forward(tokens[-1:], len(tokens) - 1, there, target)
    assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("layer", [0, 2])
def test_one_changed_value_in_the_cache_changes_the_logits(tiny_model, new_cache, tokens, which, layer):
    cache = new_cache()
    pages = cache.allocate(3)
    tiny_model.forward(tokens[:-1], 0, cache, pages)
    before = tiny_model.forward(tokens[-1:], len(tokens) - 1, cache, pages)
    cache.block[pages[1], layer, which, 1, 3, 5] += 1
    after = tiny_model.forward(tokens[-1:], len(tokens) - 1, cache, pages)
    assert before.tobytes() != after.tobytes()


def test_attention_sees_the_rounding_of_the_cache_in_prefill_too(tiny_model, new_cache, tokens):
    half, single = (new_cache(dtype=dtype) for dtype in ("float16", "float32"))
    rounded = tiny_model.forward(tokens, 0, half, half.allocate(3))
    exact = tiny_model.forward(tokens, 0, single, single.allocate(3))
    assert 1e-5 < np.abs(rounded - exact).max() < 0.1


def test_an_untied_head_is_used(tiny_weights, tiny_config, new_cache, tokens):
    negated = dataclasses.replace(tiny_weights, lm_head=-tiny_weights.lm_head)
    cache = new_cache()
    one = Model(tiny_weights).forward(tokens, 0, cache, cache.allocate(3))
    two = Model(negated).forward(tokens, 0, cache, cache.allocate(3))
    np.testing.assert_array_equal(one, -two)


@pytest.mark.parametrize(
    ("tokens", "start", "pages", "says"),
    [
        ([], 0, 1, "one or more"),
        ([97], 0, 1, r"\[0, 97\)"),
        ([-1], 0, 1, r"\[0, 97\)"),
        ([1], -1, 1, r"positions \[-1, 0\)"),
        ([1], 128, 16, "context of 128"),
        ([1] * 17, 0, 1, "17 tokens do not fit in 1 pages"),
    ],
)
def test_impossible_calls_are_refused_with_the_numbers(tiny_model, new_cache, tokens, start, pages, says):
    cache = new_cache()
    with pytest.raises(InputError, match=says):
        tiny_model.forward(tokens, start, cache, cache.allocate(pages))


def test_a_cache_of_another_shape_is_refused(tiny_model):
    cache = PagedCache(range(3), range(1), 8, 4)
    with pytest.raises(InputError, match="the model tiny has"):
        tiny_model.forward([1], 0, cache, cache.allocate(1))
