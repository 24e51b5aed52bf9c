"""Read vLLM's configuration and caches, and refuse what can't be carried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index

from kvferry.compat.checkpoint import model_id
from kvferry.compat.vllm.layouts import CacheGroup, CacheTensor, Geometry
from kvferry.errors import ConfigError

KINDS = ("FullAttentionSpec", "SlidingWindowSpec")
"""Kinds of cache groups of which the tests have seen correct tokens."""

ONE = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
"""Axes of vLLM's grid that have to be 1."""


def groups_of(vllm_config: Any, kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """The groups whose caches travel.

    Raises:
        ConfigError: a kind of cache or a grid that is not supported, by name.
    """
    for name in ONE:
        if (size := getattr(vllm_config.parallel_config, name, 1)) != 1:
            raise ConfigError(f"KVFerryConnector: {name} is {size}, supported is 1", hint="use tensor parallel ranks")
    return tuple(_group(group) for group in kv_cache_config.transfer_groups)


def geometry_of(vllm_config: Any, kv_cache_config: Any, tp_rank: int, dtype: str) -> Geometry:
    """What the caches of a rank do not say."""
    model = vllm_config.model_config
    return Geometry(
        model=model_id(str(model.model)), dtype=dtype, kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(), tp_rank=tp_rank, tp_size=vllm_config.parallel_config.tensor_parallel_size,
        num_blocks=kv_cache_config.num_blocks, groups=groups_of(vllm_config, kv_cache_config),
    )  # fmt: skip


def tensors_of(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> list[CacheTensor]:
    """What vLLM registers, by layer; a layer that uses another one's cache is left out.

    Raises:
        ConfigError: a cache is no single tensor with four axes.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    group_of = kv_cache_config.transfer_group_index_by_layer
    dtype = str(vllm_config.cache_config.cache_dtype)
    found: dict[tuple[int, int], CacheTensor] = {}
    for name, cache in kv_caches.items():
        if name in group_of:
            tensor = _tensor(name, group_of[name], cache, _format(cache, layers[name], dtype))
            found.setdefault((tensor.group, tensor.address), tensor)
    return list(found.values())


def _group(group: Any) -> CacheGroup:
    spec = group.kv_cache_spec
    spec = getattr(spec, "first_spec", spec)
    kind = type(spec).__name__
    if kind not in KINDS or group.host_resident:
        raise ConfigError(
            f"KVFerryConnector: cache group of {group.layer_names[0]} is a {kind}, supported are {', '.join(KINDS)}",
            hint="use another connector for this model",
        )
    return CacheGroup(spec.block_size, spec.sliding_window if kind == "SlidingWindowSpec" else 0)


def _tensor(name: str, group: int, cache: Any, packing: str) -> CacheTensor:
    if len(getattr(cache, "shape", ())) != 4:
        raise ConfigError(
            f"KVFerryConnector: the cache of {name} is {type(cache).__name__} {tuple(getattr(cache, 'shape', ()))}, "
            f"not [blocks, heads, tokens, K and V]",
            hint="this back-end is not supported",
        )
    element = cache.element_size()
    device = cache.get_device() if cache.device.type != "cpu" else -1
    return CacheTensor(
        name, extract_layer_index(name), group, cache.data_ptr(), tuple(cache.shape),
        tuple(stride * element for stride in cache.stride()), element, packing, device,
    )  # fmt: skip


def _format(cache: Any, layer: Any, dtype: str) -> str:
    """Who packs the bytes of a block, and what they mean: the back-end, for an instruction set where it has several."""
    backend = layer.get_attn_backend().get_name()
    stored = str(cache.dtype).removeprefix("torch.") if dtype == "auto" else dtype  # fp8 is stored as uint8
    return "/".join(part for part in ("vllm", backend, str(getattr(layer, "isa", "")), stored) if part)
