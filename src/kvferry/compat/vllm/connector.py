"""The connector: vLLM 0.32's base class, with one half behind it in each process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

import vllm
from kvferry.compat.vllm.geometry import geometry_of, groups_of, tensors_of
from kvferry.compat.vllm.layouts import layout_of
from kvferry.compat.vllm.metrics import KVFerryPromMetrics, KVFerryStats
from kvferry.compat.vllm.orders import Orders
from kvferry.compat.vllm.scheduler import SchedulerHalf
from kvferry.compat.vllm.worker import WorkerHalf

log = logging.getLogger("kvferry.vllm")

TESTED = "0.32.0"


@dataclass
class KVFerryMetadata(KVConnectorMetadata):
    """What a step brings to the workers."""

    orders: Orders = field(default_factory=Orders)


@dataclass
class KVFerryHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells its scheduler at start."""

    endpoint: str


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """One process's connector: the scheduler half or the worker half."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Begin; a worker's memory comes with register_kv_caches.

        Raises:
            ConfigError: what can't be carried, by name; the server does not start.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        _warn_of_other_versions()
        transfer, groups = self._kv_transfer_config, groups_of(vllm_config, kv_cache_config)
        self._has_one_group = len(kv_cache_config.kv_cache_groups) == 1
        self._scheduler: Any = None
        self._worker: Any = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                groups, kv_cache_config.select_transfer_block_ids, engine_id=str(transfer.engine_id),
                role=str(transfer.kv_role),
            )  # fmt: skip
        else:
            self._worker = WorkerHalf(str(transfer.kv_role), dict(transfer.kv_connector_extra_config))

    # -- scheduler

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that a load would bring beyond those that are here."""
        found: tuple[int, bool] = self._scheduler.num_matched(request, num_computed_tokens)
        return found

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A load fills every group that travels."""
        del request
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVFerryMetadata:
        """What the workers are to do in this step."""
        del scheduler_output
        return KVFerryMetadata(self._scheduler.take_orders())

    def update_connector_output(self, connector_output: Any) -> None:
        """What all workers have reported."""
        self._scheduler.loaded(connector_output.finished_recving or ())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks stay until they are sent, and the parameters for the decode server."""
        found: tuple[bool, dict[str, Any] | None] = self._scheduler.finished(request, block_ids)
        return found

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Where the workers can be reached, by TP rank."""
        self._scheduler.endpoints = tuple(metadata[rank].endpoint for rank in sorted(metadata))

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Translate and register the memory."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        tensors = tensors_of(self._vllm_config, self._kv_cache_config, kv_caches)
        dtype = str(next(iter(kv_caches.values())).dtype).removeprefix("torch.")
        geometry = geometry_of(self._vllm_config, self._kv_cache_config, get_tensor_model_parallel_rank(), dtype)
        group = [layout_of(geometry.at_tp(rank), tensors) for rank in range(geometry.tp_size)]
        self._worker.register(group[geometry.tp_rank], group, kv_caches)

    def get_handshake_metadata(self) -> KVFerryHandshake | None:
        """Where this worker can be reached, where it is a prefill rank."""
        return KVFerryHandshake(self._worker.endpoint) if self._worker.endpoint else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads and sends; neither is waited for."""
        del forward_context, kwargs
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVFerryMetadata)
        self._worker.carry_out(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A prompt is sent when all of it is computed."""

    def wait_for_save(self) -> None:
        """Blocks stay until the send is reported."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose blocks nothing touches any more."""
        del finished_req_ids
        found = self._worker.take_results()
        # with one group vLLM takes the blocks themselves, and keeps those before them
        failed = set() if self._has_one_group else found.failed
        return KVConnectorTransferResults(found.sent, found.received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load has failed."""
        found: set[int] = self._worker.take_load_errors()
        return found if self._has_one_group else set()

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        """What was measured since the last step."""
        if self._worker is None:
            return None
        stats = KVFerryStats(self._worker.measures.take())
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Stop all threads."""
        if self._worker is not None:
            self._worker.shutdown()

    # -- class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Head-major: a head of a block is one run of bytes, which another TP size can choose."""
        del vllm_config
        return "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        """Stats as vLLM carries them between processes."""
        return KVFerryStats(data) if data else KVFerryStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVFerryPromMetrics:
        """The metrics of /metrics."""
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _warn_of_other_versions() -> None:
    found = vllm.__version__.split("+")[0]
    if found != TESTED:
        log.warning("kvferry was tested with vLLM %s, this is %s; it goes on", TESTED, found)
