"""The numpy model against transformers' LlamaForCausalLM in float32, on the same dequantised weights.

Run by `make reference`, in an environment of its own that has torch and transformers; both are imported
inside the functions only, so that the default run can collect this file without them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvferry.serve.cache import PagedCache
from kvferry.serve.generate import greedy, prefill
from kvferry.serve.model import Model
from kvferry.serve.tokenizer import load_tokenizer
from kvferry.serve.transformers_folder import state_dict
from kvferry.serve.weights import ModelConfig, Weights, find_model, load, parameter_count

pytestmark = [
    pytest.mark.reference,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # other packages' warnings are not ours to fix
]

QUESTIONS = (
    "What is the capital of France?",
    "Count from 1 to 20, in digits, separated by commas.",
    "Write one sentence about a ferry that crosses a river in the fog, then one about its captain.",
)
NEW_TOKENS = 20
MOST_LOGIT_DIFFERENCE = 1e-3


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load(find_model(None))


@pytest.fixture(scope="module")
def transformers_model(weights: Weights) -> Any:
    return llama(weights, {"rope_type": "default"})


def llama(weights: Weights, rope: dict[str, Any]) -> Any:
    """transformers' model with these weights; `rope` says how its rotary positions are scaled."""
    import torch
    import transformers

    c = weights.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.ffn,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_eps,
        max_position_embeddings=c.context_tokens,
        rope_parameters={"rope_theta": c.rope_theta, **rope},
        tie_word_embeddings=c.tied_embeddings,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    state = {name: torch.from_numpy(np.array(values)) for name, values in state_dict(weights).items()}
    missing, extra = model.load_state_dict(state, strict=False)
    assert not extra
    assert missing in ([], ["lm_head.weight"]), missing  # a tied head is the embedding
    return model


def numpy_run(weights: Weights, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """(tokens[NEW_TOKENS], logits[NEW_TOKENS, vocab]) of the numpy model, with a float32 cache."""
    c, model = weights.config, Model(weights)
    cache = PagedCache(range(c.layers), range(c.kv_heads), c.head_dim, 16, dtype="float32")
    pages = cache.allocate(16)
    first, logits = prefill(model, cache, pages, prompt)
    steps = [(first, logits), *greedy(model, cache, pages, first, len(prompt), NEW_TOKENS - 1)]
    return [token for token, _ in steps], np.array([logits for _, logits in steps])


def transformers_run(model: Any, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """The same of transformers, which chooses its own tokens and computes the whole text anew for each."""
    import torch

    tokens: list[int] = []
    logits: list[np.ndarray] = []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            out = model(torch.tensor([prompt + tokens]), use_cache=False)
            logits.append(out.logits[0, -1].numpy())
            tokens.append(int(logits[-1].argmax()))
    return tokens, np.array(logits)


@pytest.mark.parametrize("question", QUESTIONS)
def test_tokens_are_equal_and_logits_close(
    weights: Weights, transformers_model: Any, question: str, record_property: Any
) -> None:
    prompt = load_tokenizer(find_model(None)).encode_chat([("user", question)])
    tokens, logits = numpy_run(weights, prompt)
    expected_tokens, expected_logits = transformers_run(transformers_model, prompt)
    assert tokens == expected_tokens
    differences = np.abs(logits - expected_logits).max(axis=1)
    record_property("prefill_max_abs_difference", float(differences[0]))
    record_property("decode_max_abs_difference", float(differences[1:].max()))
    print(f"{len(prompt)} tokens: max |dlogit| prefill {differences[0]:.2e}, decode {differences[1:].max():.2e}")
    assert differences.max() <= MOST_LOGIT_DIFFERENCE


LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def test_llama_3_rotary_positions_are_the_plain_ones_divided_by_their_factors() -> None:
    c = ModelConfig(
        name="random", layers=2, heads=4, kv_heads=2, head_dim=16, hidden=64, ffn=96, vocab=101,
        rope_theta=500000.0, rms_eps=1e-5, context_tokens=2048, tied_embeddings=True, eos_ids=(),
    )  # fmt: skip
    flat = np.random.default_rng(5).standard_normal(parameter_count(c), np.float32) * np.float32(0.2)
    weights = Weights.from_flat(c, flat)
    model = llama(weights, LLAMA3_ROPE)
    plain = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert len({round(float(factor), 3) for factor in factors}) > 2  # kept, in between, and stretched in full
    stretched = dataclasses.replace(weights, config=dataclasses.replace(c, rope_factors=tuple(factors.tolist())))
    prompt = [int(token) for token in np.random.default_rng(6).integers(0, c.vocab, 150)]
    tokens, logits = numpy_run(stretched, prompt)
    expected_tokens, expected_logits = transformers_run(model, prompt)
    assert tokens == expected_tokens
    assert np.abs(logits - expected_logits).max() <= MOST_LOGIT_DIFFERENCE
    assert np.abs(numpy_run(weights, prompt)[1][0] - expected_logits[0]).max() > 10 * MOST_LOGIT_DIFFERENCE
