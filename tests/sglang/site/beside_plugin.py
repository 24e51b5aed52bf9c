"""A plug-in for SGLang where its own connectors run beside ours on a CPU: what they need there, and their metrics.

SGLang measures every backend's transfer with the same code; what it finds for a request is written down here.
"""

from __future__ import annotations

import json
import os
from typing import Any

METRICS = "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.compute_and_observe_kv_transfer_metrics"


def host_pages(result: Any, _backend: Any, _kind: Any) -> Any:
    """Mooncake's sender asks for page numbers in pinned memory, which a CPU does not have."""
    if getattr(result, "supports_host_tensor_indices", False):
        result.supports_host_tensor_indices = False
    return result


def host_memory(_result: Any, _kinds: Any, expected_len: int) -> list[str]:
    """NIXL's connector takes every pool for memory of a GPU."""
    return ["DRAM"] * expected_len


def write_down(found: dict[str, float] | None, *_: Any) -> dict[str, float] | None:
    """Append SGLang's own figures of one transfer to the file that FERRY_BESIDE names."""
    if found:
        with open(os.environ["FERRY_BESIDE"], "a") as out:
            out.write(json.dumps(found) + "\n")
    return found


def register() -> None:
    """Called by SGLang in each of its processes."""
    if "FERRY_BESIDE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.disaggregation.prefill.get_kv_class", host_pages, HookType.AFTER)
    HookRegistry.register("sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds", host_memory, HookType.AFTER)
    HookRegistry.register(METRICS, write_down, HookType.AFTER)
