"""What schedulers call: the same for every engine."""

from kvferry.api.base import BaseKVBootstrapServer, BaseKVManager, BaseKVReceiver, BaseKVSender
from kvferry.api.bootstrap_server import KVBootstrapServer
from kvferry.api.classes import get_kv_class
from kvferry.api.cp import filter_kv_indices_for_cp_rank, page_indices_to_cp_rank_page_indices
from kvferry.api.facts import ReceiveFacts, SendFacts
from kvferry.api.group import GroupState, poll_group
from kvferry.api.kvpoll import DisaggregationMode, KVClassType, KVPoll, KVTransferMetric
from kvferry.api.manager import KVManager
from kvferry.api.memory import KVArgs
from kvferry.api.page_lists import group_concurrent_contiguous
from kvferry.api.receiver import KVReceiver
from kvferry.api.sender import KVSender
from kvferry.api.tag import request_tag

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
    "KVTransferMetric",
    "ReceiveFacts",
    "SendFacts",
    "filter_kv_indices_for_cp_rank",
    "get_kv_class",
    "group_concurrent_contiguous",
    "page_indices_to_cp_rank_page_indices",
    "poll_group",
    "request_tag",
]
