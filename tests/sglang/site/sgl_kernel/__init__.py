"""Stands in for SGLang's kernel package, which has no build for a CPU without AMX on the package index.

SGLang imports a handful of names ending in _cpu when it runs on a CPU. One of them is within reach of a text model:
it is done with torch here. Whoever calls another one is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Write each request's new slots, which lie one after another in out_cache_loc, into its row of the table."""
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    taken = 0
    for row, start, end in rows:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., None]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"tests/sglang: sgl_kernel.{name} has no stand-in")

    return absent
