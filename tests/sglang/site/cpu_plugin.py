"""A plug-in for SGLang in these tests: what a CPU lacks. It is found by its entry point, since site/ is on the path.

On a CPU work is done when a call returns, so an event that has nothing to wait for is a true one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import host_pool

ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
MLA_HANDLER = "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler"


class FinishedEvent:
    """Stands in for torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Nothing is under way."""

    def wait(self, *_: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True


def latent_attention(handler: Any, _registry: Any, backend: str) -> Any:
    """torch_native has no handler of its own, and that of another backend picks a form which it can't do."""
    if backend != "torch_native":
        return handler
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda *_: AttnForwardMethod.MLA


def window_attention(
    forward: Callable[..., Any], backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """torch_native reads the pool of windows with slot numbers of the other pool: give it the right ones.

    It is right by itself only as long as both pools hand out equal numbers.
    """
    if not backend.use_sliding_window_kv_pool or not backend.token_to_kv_pool.layers_mapping[layer.layer_id][1]:
        return forward(backend, q, k, v, layer, *args, **kwargs)
    kept = backend.req_to_token_pool
    slots = backend.token_to_kv_pool.translate_loc_from_full_to_swa(kept.req_to_token)
    backend.req_to_token_pool = SimpleNamespace(req_to_token=slots)
    try:
        return forward(backend, q, k, v, layer, *args, **kwargs)
    finally:
        backend.req_to_token_pool = kept


def register() -> None:
    """Called by SGLang in each of its processes."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not torch.cuda.is_available():
        torch.cuda.Event = FinishedEvent
    HookRegistry.register(MLA_HANDLER, latent_attention, HookType.AFTER)
    for name in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{ATTENTION}.{name}", window_attention, HookType.AROUND)
    host_pool.register()
    if "FERRY_TEST_RECORDS" in os.environ:
        import recorder

        recorder.register()
