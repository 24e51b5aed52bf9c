"""A small random Llama, in memory and as a GGUF file, and the packaged SmolLM2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest

from kvferry.serve.cache import PagedCache
from kvferry.serve.model import Model
from kvferry.serve.weights import ModelConfig, Weights, find_model, load, parameter_count

TINY = ModelConfig(
    name="tiny", layers=3, heads=6, kv_heads=2, head_dim=8, hidden=32, ffn=64, vocab=97, rope_theta=10000.0,
    rms_eps=1e-5, context_tokens=128, tied_embeddings=True, eos_ids=(2,),
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return TINY


@pytest.fixture(scope="session")
def tiny_weights() -> Weights:
    flat = np.random.default_rng(7).standard_normal(parameter_count(TINY), np.float32) * np.float32(0.3)
    weights = Weights.from_flat(TINY, flat)
    for layer in weights.layers:
        layer.attention_norm[:] += 1
        layer.mlp_norm[:] += 1
    return weights


@pytest.fixture(scope="session")
def tiny_model(tiny_weights: Weights) -> Model:
    return Model(tiny_weights)


@pytest.fixture
def new_cache() -> Callable[..., PagedCache]:
    def make(num_pages: int = 16, config: ModelConfig = TINY, **options: Any) -> PagedCache:
        return PagedCache(range(config.layers), range(config.kv_heads), config.head_dim, num_pages, **options)

    return make


@pytest.fixture
def tokens() -> list[int]:
    return [int(t) for t in np.random.default_rng(3).integers(0, TINY.vocab, 43)]


def side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which converters store q and k: rotary pairs next to each other."""
    per_head = rows.reshape(heads, rows.shape[0] // heads, rows.shape[1])
    half = per_head.shape[1] // 2
    pairs = np.stack([per_head[:, :half], per_head[:, half:]], axis=2)
    return pairs.reshape(rows.shape)


def gguf_tensors(weights: Weights) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file that holds these weights."""
    c = weights.config
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    found = {"token_embd.weight": weights.embedding, "output_norm.weight": weights.norm}
    for i, layer in enumerate(weights.layers):
        parts = {
            "attn_norm": layer.attention_norm,
            "attn_q": side_by_side(layer.qkv[:queries], c.heads),
            "attn_k": side_by_side(layer.qkv[queries : queries + keys], c.kv_heads),
            "attn_v": layer.qkv[queries + keys :],
            "attn_output": layer.attention_out,
            "ffn_norm": layer.mlp_norm,
            "ffn_gate": layer.gate_up[: c.ffn],
            "ffn_up": layer.gate_up[c.ffn :],
            "ffn_down": layer.down,
        }
        found |= {f"blk.{i}.{name}.weight": values for name, values in parts.items()}
    return found


VOCAB = ["<eos>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "ab", "abc", "Ġ", "Ġa", "1", "2", "12"]
METADATA: dict[str, Any] = {
    "llama.block_count": TINY.layers,
    "llama.context_length": TINY.context_tokens,
    "llama.embedding_length": TINY.hidden,
    "llama.feed_forward_length": TINY.ffn,
    "llama.attention.head_count": TINY.heads,
    "llama.attention.head_count_kv": TINY.kv_heads,
    "llama.attention.key_length": TINY.head_dim,
    "llama.attention.layer_norm_rms_epsilon": TINY.rms_eps,
    "llama.rope.freq_base": TINY.rope_theta,
    "general.name": "tiny",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": VOCAB,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(VOCAB) - 3),
    "tokenizer.ggml.merges": ["a b", "ab c", "Ġ a", "1 2"],
    "tokenizer.ggml.eos_token_id": 2,
}
EMPTY: Mapping[str, Any] = MappingProxyType({})


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], arch: str) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    adders = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        (writer.add_bool if isinstance(value, bool) else adders[type(value)])(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny_weights: Weights, cache_home: Path) -> Callable[..., Path]:
    """Write the tiny model; a value of None leaves a key or tensor out. It is cached under `cache_home`."""

    def write(metadata: Mapping[str, Any] = EMPTY, tensors: Mapping[str, Any] = EMPTY, arch: str = "llama") -> Path:
        keys = {key: value for key, value in {**METADATA, **metadata}.items() if value is not None}
        all_tensors = {**gguf_tensors(tiny_weights), **tensors}
        kept = {name: values for name, values in all_tensors.items() if values is not None}
        return write_gguf(tmp_path / "tiny.gguf", keys, kept, arch)

    return write


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "cache-home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def only_the_cache(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it: from then on importing gguf fails, so that a model can only come from the cache."""
    return lambda: monkeypatch.setitem(sys.modules, "gguf", None)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return find_model(None)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Model:
    return Model(load(smollm2_path))
