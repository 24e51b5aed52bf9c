"""What a worker half counts, as vLLM carries it between processes."""

import json

from kvferry.api import KVTransferMetric
from kvferry.compat.vllm import measures


def taken():
    made = measures.Measures()
    made.add("load", KVTransferMetric(0.5, 0.1, 2**20))
    made.add("load", KVTransferMetric(1.5, 0.1, 2**20))
    made.add("send", KVTransferMetric(0.5, None, 7))
    made.count_failure("load", "no_claim")
    return made.take(), made


def test_what_is_taken_is_counted_once():
    data, made = taken()
    assert not measures.is_empty(data)
    assert measures.is_empty(made.take())
    assert data == {
        "load_seconds": [0.5, 1.5], "load_bytes": [2**20, 2**20], "sends": 1, "failures": {"load:no_claim": 1},
    }  # fmt: skip


def test_ranks_are_added_up_after_a_journey():
    total, _ = taken()
    measures.merge(total, json.loads(json.dumps(taken()[0])))
    assert (total["sends"], total["failures"], len(total["load_seconds"])) == (2, {"load:no_claim": 2}, 4)


def test_the_line_of_the_log():
    assert measures.summary(taken()[0]) == {
        "loads": 2, "sends": 1, "failures": 1, "mean load (ms)": 1000.0, "loaded (MiB)": 2.0, "MiB/s per load": 1.0,
        "load:no_claim": 1,
    }  # fmt: skip
    assert measures.summary(measures.empty())["mean load (ms)"] == 0
