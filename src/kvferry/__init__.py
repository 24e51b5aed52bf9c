"""kvferry: the connector layer for disaggregated LLM serving.

A request's KV cache travels from the prefill worker that computed it to the decode worker that goes on with it:
byte-exact, between any two layouts, over any transfer engine.
"""

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
