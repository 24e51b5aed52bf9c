"""vLLM's hooks for its log line "KV Transfer metrics" and for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.compat.vllm import measures

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BYTES = tuple(float(1 << power) for power in range(12, 37, 2))


@dataclass
class KVFerryStats(KVConnectorStats):
    """The measures of some ranks and steps."""

    data: dict[str, Any] = field(default_factory=measures.empty)

    def reset(self) -> None:
        """Forget all."""
        self.data = measures.empty()

    def aggregate(self, other: KVConnectorStats) -> KVFerryStats:
        """Add another rank's, or a later interval's."""
        measures.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for the log."""
        return measures.summary(self.data)

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return measures.is_empty(self.data)


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """kvferry's metrics among those of vLLM's /metrics."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._load_seconds = self._histogram_cls(
            name="kvferry:load_seconds", documentation="From naming the blocks to Success, per request and rank.",
            buckets=SECONDS, labelnames=labelnames,
        )  # fmt: skip
        self._load_bytes = self._histogram_cls(
            name="kvferry:load_bytes", documentation="Bytes that landed, per request and rank.", buckets=BYTES,
            labelnames=labelnames,
        )  # fmt: skip
        self._sends = self._counter_cls(
            name="kvferry:sends", documentation="Requests handed over, per rank.", labelnames=labelnames
        )
        self._failures = self._counter_cls(
            name="kvferry:failures", documentation="Requests whose hand-over failed, by what was done and why.",
            labelnames=[*labelnames, "what", "code"],
        )  # fmt: skip

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take over what the ranks have measured."""
        values = self.per_engine_labelvalues[engine_idx]
        for histogram, name in ((self._load_seconds, "load_seconds"), (self._load_bytes, "load_bytes")):
            for value in transfer_stats_data[name]:
                histogram.labels(*values).observe(value)
        self._sends.labels(*values).inc(transfer_stats_data["sends"])
        for kind, count in transfer_stats_data["failures"].items():
            self._failures.labels(*values, *kind.split(":", 1)).inc(count)
