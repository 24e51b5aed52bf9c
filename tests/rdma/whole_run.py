"""One whole run from prefill to decode over an engine: unequal layouts, every byte checked, as RoCE packets."""

from packets import least_packets, sent_packets

from kvferry.presets import attention, layouts_of, parse_grid
from kvferry.testing.cluster import Cluster

MODEL = attention("gqa", layers=4, kv_heads=4, head_dim=64)
PATIENT = {"bootstrap_timeout_s": 120.0, "claim_timeout_s": 120.0, "stall_s": 60.0, "heartbeat_timeout_s": 60.0}


def carry(engine, options):
    """From one prefill rank to one decode rank, a process each: pages of another size and order."""
    prefill, decode = (layouts_of(MODEL, parse_grid(text), 40) for text in ("page=16", "page=64,order=hnd"))
    text = ",".join(f"{name}={value}" for name, value in options.items())
    with Cluster(prefill, decode, engine=engine, processes=True, engine_options=text, **PATIENT) as cluster:
        for num_tokens, chunk_pages in ((130, 2), (200, 4)):
            before = sent_packets()
            request = cluster.request(num_tokens, prefix=5, chunk_pages=chunk_pages)
            request.wait()
            request.check()
            assert sent_packets() - before >= least_packets(request.landed_bytes) > 0
            request.clear()
        assert cluster.clean() == []
