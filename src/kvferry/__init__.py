"""kvferry: the connector layer for disaggregated LLM serving.

A request's KV cache travels from the prefill worker that computed it to the decode worker that goes on with it:
byte-exact, between any two layouts, over any transfer engine.

What is named here is imported when it is first used: `import kvferry` alone costs next to nothing, which every pytest
run pays where kvferry is installed (`kvferry.testing.plugin`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.api import (
        BaseKVBootstrapServer,
        BaseKVManager,
        BaseKVReceiver,
        BaseKVSender,
        DisaggregationMode,
        GroupState,
        KVArgs,
        KVBootstrapServer,
        KVClassType,
        KVManager,
        KVPoll,
        KVReceiver,
        KVSender,
        KVTransferMetric,
        ReceiveFacts,
        SendFacts,
        filter_kv_indices_for_cp_rank,
        get_kv_class,
        group_concurrent_contiguous,
        page_indices_to_cp_rank_page_indices,
        poll_group,
        request_tag,
    )
    from kvferry.errors import KvferryError, KVTransferError
    from kvferry.pool import Pool, allocate_pool

__version__ = "0.1.0.dev0"

__all__ = [
    "BaseKVBootstrapServer",
    "BaseKVManager",
    "BaseKVReceiver",
    "BaseKVSender",
    "DisaggregationMode",
    "GroupState",
    "KVArgs",
    "KVBootstrapServer",
    "KVClassType",
    "KVManager",
    "KVPoll",
    "KVReceiver",
    "KVSender",
    "KVTransferError",
    "KVTransferMetric",
    "KvferryError",
    "Pool",
    "ReceiveFacts",
    "SendFacts",
    "__version__",
    "allocate_pool",
    "filter_kv_indices_for_cp_rank",
    "get_kv_class",
    "group_concurrent_contiguous",
    "page_indices_to_cp_rank_page_indices",
    "poll_group",
    "request_tag",
]

_HOMES = {"KVTransferError": "errors", "KvferryError": "errors", "Pool": "pool", "allocate_pool": "pool"}
"""Where names come from that are not in `kvferry.api`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
