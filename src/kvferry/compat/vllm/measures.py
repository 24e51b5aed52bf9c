"""What a worker half measures, as the plain lists and counts that vLLM carries to its log and its metrics."""

from __future__ import annotations

from typing import Any

from kvferry.api import KVTransferMetric

Data = dict[str, Any]


def empty() -> Data:
    """No transfer: seconds and bytes of each load, bytes of each send, failures by "what:code"."""
    return {"load_seconds": [], "load_bytes": [], "sends": 0, "failures": {}}


def merge(into: Data, other: Data) -> None:
    """Add another rank's, or a later interval's."""
    for name in ("load_seconds", "load_bytes"):
        into[name].extend(other[name])
    into["sends"] += other["sends"]
    for kind, count in other["failures"].items():
        into["failures"][kind] = into["failures"].get(kind, 0) + count


def is_empty(data: Data) -> bool:
    """Whether nothing has happened."""
    return not (data["load_seconds"] or data["sends"] or data["failures"])


def summary(data: Data) -> dict[str, int | float]:
    """A few numbers for a line of log."""
    seconds, loads = sum(data["load_seconds"]), len(data["load_seconds"])
    mib = sum(data["load_bytes"]) / 2**20
    found: dict[str, int | float] = {
        "loads": loads, "sends": data["sends"], "failures": sum(data["failures"].values()),
        "mean load (ms)": round(1e3 * seconds / loads, 3) if loads else 0,
        "loaded (MiB)": round(mib, 3), "MiB/s per load": round(mib / seconds, 3) if seconds else 0,
    }  # fmt: skip
    return {**found, **data["failures"]}


class Measures:
    """One rank's, until they are taken."""

    def __init__(self) -> None:
        self._data = empty()

    def add(self, what: str, metric: KVTransferMetric) -> None:
        """A room that succeeded: `what` is "load" or "send"."""
        if what == "send":
            self._data["sends"] += 1
        else:
            self._data["load_seconds"].append(metric.transfer_latency_s or 0.0)
            self._data["load_bytes"].append(metric.transfer_total_bytes)

    def count_failure(self, what: str, code: str) -> None:
        """A room that failed, with the code of its reason."""
        kind = f"{what}:{code}"
        self._data["failures"][kind] = self._data["failures"].get(kind, 0) + 1

    def take(self) -> Data:
        """All since the last call."""
        data, self._data = self._data, empty()
        return data
