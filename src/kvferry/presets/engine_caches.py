"""How well-known serving engines lay their caches out, in the words of a Grid."""

from __future__ import annotations

from typing import NamedTuple


class EngineCache(NamedTuple):
    """An engine's arrangement.

    Attributes:
        arrange: the axes outside of a page, see Grid.
        order: the axes inside of it, see Grid.
        shapes: the engine's own tensors, outermost axis first.
        source: where they are made.
    """

    arrange: str
    order: str
    shapes: tuple[str, ...]
    source: str


_VLLM = "get_kv_cache_shape and get_kv_cache_stride_order of vLLM (vllm/v1/attention/backends/flashinfer.py)"

ENGINE_CACHES: dict[str, EngineCache] = {
    "sglang": EngineCache(
        "layer",
        "nhd",
        (
            "MHA: k_buffer[layer], then v_buffer[layer]: [tokens, heads, head_dim]",
            "MLA: kv_buffer[layer]: [tokens, 1, latent + rotary]",
            "hybrid: MHA, and conv [layer, slot, channels, kernel - 1] and temporal [layer, slot, heads, d, d]",
        ),
        "MHATokenToKVPool, MLATokenToKVPool and MambaPool of SGLang (python/sglang/srt/mem_cache/memory_pool.py)",
    ),
    "vllm-nhd": EngineCache("block", "nhd", ("per layer: [blocks, 2, tokens, heads, head_dim]",), _VLLM),
    "vllm-hnd": EngineCache("block", "hnd", ("per layer: [blocks, 2, heads, tokens, head_dim]",), _VLLM),
}
"""By the name that a grid's `cache=` takes."""
