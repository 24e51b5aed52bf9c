"""vLLM, unmodified: `--kv-transfer-config '{"kv_connector": "KVFerryConnector", ...}'`, by its path for connectors.

`connector` is what vLLM makes, once in the scheduler's process and once in each worker; `scheduler` and `worker` are
its two halves; `layouts` translates vLLM's caches into a layout, `geometry` reads them; `params` is what travels
through the proxy.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import vLLM only when vLLM asks for the connector."""
    if name != "KVFerryConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.compat.vllm.connector import KVFerryConnector

    return KVFerryConnector
