"""Two tests of a user's own grids: pytest examples/test_integration.py."""

from kvferry.presets import attention, layouts_of, parse_grid
from kvferry.testing import Cluster

MODEL = attention("my-model", layers=4, kv_heads=8, head_dim=64)
PREFILL, DECODE = (layouts_of(MODEL, parse_grid(grid), 64) for grid in ("tp=4,page=16", "tp=1,page=64,order=hnd"))


def test_a_request_arrives_whole() -> None:
    with Cluster(PREFILL, DECODE, engine="local", proxy=True) as cluster:
        cluster.proxies[0].drop = 0.2
        request = cluster.request(num_tokens=130, prefix=37, chunk_pages=2)
        request.wait()
        request.check()
        request.clear()
        assert cluster.clean() == []


def test_an_aborted_request_leaves_nothing() -> None:
    with Cluster(PREFILL, DECODE) as cluster:
        request = cluster.request(num_tokens=130, chunk_pages=2, sends=False)
        request.send(1)
        request.abort("decode", "the client hung up")
        assert set(request.ends()) == {"Failed"}
        request.clear()
        assert cluster.clean() == []
    assert cluster.clean() == []
