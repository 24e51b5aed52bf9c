"""What SGLang asks its own registry is answered by ours, in its words."""

import json
import urllib.error
import urllib.request

import pytest

from kvferry import KVBootstrapServer
from kvferry.bootstrap import BootstrapClient, RankEntry
from kvferry.compat.sglang.routes import AXES, ROUTES
from kvferry.ids import Rank

SIZES = Rank(2, 1, 1, 2)


@pytest.fixture
def server():
    with KVBootstrapServer(port=0, secret="open sesame", more=ROUTES) as made:
        yield made


def register(server, *ranks):
    client = BootstrapClient(f"127.0.0.1:{server.port}", token="open sesame")
    for rank in ranks:
        extra = {"http_port": "31100", "page_size": "16", "kv_cache_dtype": "bfloat16"}
        client.register(
            RankEntry(rank, SIZES, f"tcp://127.0.0.1:{5000 + rank.dp * 2 + rank.tp}", "d", 1 + rank.tp, 0, "", extra)
        )
    return client


def ask(server, path, body=None, token="open sesame"):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(server.url + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def query(**ranks):
    return "/route?" + "&".join(f"{name}={ranks.get(axis, -1)}" for axis, name in AXES.items())


def test_the_grid_is_there_once_all_ranks_are(server):
    ranks = [Rank(dp, 0, 0, tp) for dp in range(2) for tp in range(2)]
    assert ask(server, query())[0] == 503
    register(server, *ranks[:3])
    assert ask(server, query()) == (503, "3 prefill ranks are registered, 1 are missing")
    register(server, ranks[3])
    assert ask(server, query()) == (200, {
        "attn_tp_size": 2, "attn_cp_size": 1, "dp_size": 2, "pp_size": 1, "page_size": 16, "kv_cache_dtype": "bfloat16",
        "follow_bootstrap_room": False, "prefill_http_port": 31100,
    })  # fmt: skip
    assert ask(server, query(dp=1, pp=0, cp=0, tp=0)) == (200, {"rank_ip": "127.0.0.1", "rank_port": 5002})
    assert ask(server, query(dp=5, pp=0, cp=0, tp=0)) == (404, "no prefill rank dp5 pp0 cp0 tp0")


@pytest.mark.parametrize(
    "path", ["/route", "/route?prefill_dp_rank=x&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"]
)
def test_a_question_that_makes_no_sense_is_answered_in_words(server, path):
    status, text = ask(server, path)
    assert (status, "wants whole numbers" in text) == (400, True)


def test_the_grid_needs_the_token_and_dp_ranks_do_not(server):
    client = register(server, *(Rank(dp, 0, 0, tp) for dp in range(2) for tp in range(2)))
    client.put_rooms({7: 1, 8: 0})
    assert ask(server, query(), token="")[0] == 401
    assert ask(server, "/query_dp_ranks", b'{"bootstrap_rooms": [7, 8, 9]}', token="") == (200, {"7": 1, "8": 0})
    assert ask(server, "/query_dp_ranks", b"[]", token="")[0] == 400
    assert ask(server, "/query_dp_ranks", b'{"bootstrap_rooms": [-1]}', token="")[0] == 400
