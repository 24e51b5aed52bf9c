"""SGLang's pool in host memory on a CPU: there is no page to pin, and its copying kernels are for GPUs.

Both are stood in for with torch: between this pool and the device's, rows are copied by their slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

COMMON = "sglang.srt.mem_cache.pool_host.common"
POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"


def not_pinned(_register: Callable[..., None], *_: Any, **__: Any) -> None:
    """Memory of a CPU needs no registration."""


def load_layer(
    load: Callable[..., None], pool: Any, device_pool: Any, host_slots: Any, device_slots: Any, layer: int,
    *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    """Copy one layer of a request from the host pool."""
    del load, device_pool, args, kwargs
    pool.device_k_buffers[layer][device_slots] = pool.k_buffer[layer][host_slots]
    pool.device_v_buffers[layer][device_slots] = pool.v_buffer[layer][host_slots]


def back_up(
    store: Callable[..., None], pool: Any, device_pool: Any, host_slots: Any, device_slots: Any, *args: Any
) -> None:
    """Copy all layers of a request to the host pool."""
    del store, device_pool, args
    for layer, (keys, values) in enumerate(zip(pool.device_k_buffers, pool.device_v_buffers, strict=True)):
        pool.k_buffer[layer][host_slots] = keys[device_slots]
        pool.v_buffer[layer][host_slots] = values[device_slots]


def register() -> None:
    """Called by SGLang's plug-in loader, through cpu_plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{COMMON}._cuda_host_register", not_pinned, HookType.AROUND)
    HookRegistry.register(f"{POOL}.load_to_device_per_layer", load_layer, HookType.AROUND)
    HookRegistry.register(f"{POOL}.backup_from_device_all_layer", back_up, HookType.AROUND)
