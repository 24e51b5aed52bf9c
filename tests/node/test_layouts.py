"""Any layout to any layout, through real managers of whole sides: every byte, guards included, is compared."""

import itertools

import msgspec
import numpy as np
import pytest

from engine_here import ENGINES, need, of_cluster
from kvferry import KVArgs, KVPoll, KVReceiver, KVSender
from kvferry.errors import InputError, LayoutError
from kvferry.layout import Ranges, Rows, Slot, Window
from kvferry.presets import Block, Item, ModelShape, attention, layouts_of, parse_grid
from kvferry.testing.cluster import Cluster
from kvferry.testing.cluster_rank import ClusterRank

KV = (Item("k", 3, 4), Item("v", 5, 4))
GQA = attention("gqa", layers=5, kv_heads=4, head_dim=3)
MLA = ModelShape("mla", (Block("kv", tuple(range(5)), (Item("latent", 7),)),))
CONV = (Item("conv_q", 3, 2), Item("conv_k", 3, 2), Item("conv_v", 5, 4), Item("ssm", 9, 4, "float32"))
HYBRID = ModelShape(
    "hybrid",
    (
        Block("kv", (0, 3, 6), KV),
        Block("swa", (2, 5), (Item("k", 3, 2), Item("v", 3, 2)), Window(33)),
        Block("mamba", (1, 4), CONV, Slot(), per="request"),
    ),
)
SLIDING = ModelShape("sliding", (Block("kv", (0, 1), KV, Window(33)),))
HYBRID_MLA = ModelShape(
    "hybrid-mla",
    (
        Block("kv", (0, 2), (Item("latent", 6),)),
        Block("mamba", (1, 3), CONV, Slot(), per="request"),
        Block("index", (0, 2), (Item("index_k", 2),), Rows()),
    ),
)
DRAFT = ModelShape("draft", (Block("kv", (0, 1, 2, 3), KV),))


def sides(model, prefill, decode):
    return [layouts_of(model, parse_grid(text), 60) for text in (prefill, decode)]


def carry(cluster, num_tokens, **facts):
    """One request, all of it checked; the bytes that came, and those that were asked for."""
    request = cluster.request(num_tokens, **{"room": 5, **facts})
    request.wait(60)
    request.check()
    found = request.landed_bytes, request.wanted_bytes
    request.clear()
    return found


@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        (GQA, "tp=4,page=16", "tp=1,page=32,order=hnd"),
        (GQA, "tp=1,page=32,order=hnd,arrange=page", "tp=3,page=16"),
        (GQA, "tp=8,page=16", "tp=3,page=4,arrange=block"),
        (GQA, "pp=3,page=16", "pp=2,stages=1/4,page=8"),
        (GQA, "cp=2,page=16", "tp=2,page=16"),
        (GQA, "cp=3,deal=zigzag,page=8", "dcp=2,page=16"),
        (GQA, "cp=2,deal=page,page=16", "cp=2,deal=contiguous,page=8"),
        (GQA, "tp=2,pp=2,cp=2,deal=zigzag,page=16", "tp=3,pp=3,dcp=2,page=32,order=hnd,arrange=page"),
        (MLA, "tp=4,page=16", "tp=1,page=16"),
        (MLA, "tp=2,page=16", "tp=4,page=64"),
        (MLA, "tp=2,page=16", "dcp=4,page=16"),
        (HYBRID, "tp=2,page=16", "tp=1,page=16"),
        (HYBRID, "tp=1,page=16", "tp=4,page=8,order=hnd"),
        (HYBRID, "pp=3,tp=4,page=8", "pp=2,tp=2,page=32"),
        (SLIDING, "tp=2,page=16", "page=8"),
        (SLIDING, "cp=2,deal=page,page=16", "dcp=2,page=16"),
        (HYBRID_MLA, "tp=4,page=16", "tp=2,page=16"),
        (HYBRID_MLA, "tp=2,pp=2,page=16", "tp=1,page=64"),
    ],
)
@pytest.mark.parametrize(("num_tokens", "prefix", "chunk_pages"), [(130, 0, 3), (131, 37, 1000), (17, 0, 1), (1, 0, 1)])
def test_every_rank_gets_what_it_holds_and_nothing_else(model, prefill, decode, num_tokens, prefix, chunk_pages):
    with Cluster(*sides(model, prefill, decode)) as cluster:
        total, wanted = carry(cluster, num_tokens, prefix=prefix, chunk_pages=chunk_pages, rows=3)
        assert total == wanted, "each byte once, whoever else holds it"
        assert cluster.clean() == []


@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        (GQA, "tp=4,page=16", "tp=1,page=32,order=hnd"),
        (GQA, "cp=3,deal=zigzag,page=8", "dcp=2,page=16"),
        (HYBRID, "pp=3,tp=4,page=8", "pp=2,tp=2,page=32"),
        (HYBRID_MLA, "tp=2,pp=2,page=16", "tp=1,page=64"),
    ],
)
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "local"])
def test_so_it_is_over_other_engines(engine, model, prefill, decode):
    need(engine)
    patient = {"bootstrap_timeout_s": 60.0, "claim_timeout_s": 60.0}  # up to 48 instances of a library start at once
    with Cluster(*sides(model, prefill, decode), **patient, **of_cluster(engine)) as cluster:
        for num_tokens, prefix, chunk_pages in [(130, 0, 3), (131, 37, 1000), (1, 0, 1)]:
            total, wanted = carry(cluster, num_tokens, room=None, prefix=prefix, chunk_pages=chunk_pages, rows=3)
            assert total == wanted
        assert cluster.clean() == []


def test_a_room_may_be_in_any_dp_group_of_either_side():
    grids = [("tp=2,page=16,dp=2", 2), ("tp=3,page=8,dp=3", 3)]
    prefill, decode = (
        [layout for dp in range(groups) for layout in layouts_of(GQA, parse_grid(text), 200, dp)]
        for text, groups in grids
    )
    with Cluster(prefill, decode) as cluster:
        for room, (source, target) in enumerate(itertools.product(range(2), range(3)), 5):
            total, wanted = carry(cluster, 130, room=room, prefix=room, groups=(source, target))
            assert total == wanted


def test_many_rooms_of_replicas_are_spread_and_right():
    with Cluster(*sides(MLA, "tp=4,page=16", "tp=1,page=16")) as cluster:
        for room in range(4, 12):
            total, wanted = carry(cluster, 20, room=room)
            assert total == wanted
        sent = [rank.manager.info()["counts"] for rank in cluster.prefill]
        assert len(sent) == 4


def test_draft_layers_that_only_decode_has_stay_as_they_are():
    prefill = layouts_of(DRAFT, parse_grid("tp=2,page=16"), 60)
    with_draft = ModelShape("draft", (Block("kv", (0, 1, 2, 3, 4), KV),))
    (decode,) = layouts_of(with_draft, parse_grid("page=16"), 60)
    tensors = tuple(msgspec.structs.replace(each, optional=each.layers == (4,)) for each in decode.tensors)
    with Cluster(prefill, [msgspec.structs.replace(decode, tensors=tensors)]) as cluster:
        carry(cluster, 50)


def test_draft_layers_that_only_prefill_has_are_not_sent():
    with_draft = ModelShape("draft", (Block("kv", (0, 1, 2, 3, 4), KV),))
    with Cluster(
        layouts_of(with_draft, parse_grid("pp=2,page=16"), 60), layouts_of(DRAFT, parse_grid("page=8"), 60)
    ) as cluster:
        total, wanted = carry(cluster, 50)
        assert total == wanted


def test_a_group_that_the_rank_is_not_in_is_refused_before_anything_starts():
    """Nobody could say which of several replicas the rank should turn to."""
    ours, theirs = sides(GQA, "tp=2,page=16", "tp=2,page=16")
    with pytest.raises(LayoutError, match="decode group: dp0 pp0 cp0 tp0 is not among its ranks dp0 pp0 cp0 tp1"):
        ClusterRank("decode", theirs[0], theirs[1:], ours, "local", {})
    with Cluster(ours, theirs) as cluster:
        rank = cluster.decode[0]
        with pytest.raises(LayoutError, match="is there twice"):
            rank.manager.update_buffers(KVArgs(rank.layout, (), [rank.aux], theirs * 2))
        total, wanted = carry(cluster, 20)
        assert total == wanted


def test_prefill_begins_where_decode_has_enough():
    with Cluster(*sides(GQA, "tp=2,page=16", "tp=1,page=64")) as cluster:
        carry(cluster, 131, prefix=37, first_token=32)


def test_where_both_sides_have_all_already_no_page_is_listed():
    """Also if the last page is not full: prefill begins at token 130, which is the request's end."""
    with Cluster(*sides(GQA, "tp=2,page=16", "page=64")) as cluster:
        assert carry(cluster, 130, prefix=130, first_token=130)[0] == 0


@pytest.mark.parametrize("prefix", [0, 1 * 16, 5 * 16, 9 * 16, 10 * 16])
def test_the_first_pages_that_decode_has_are_not_touched(prefix):
    """Field note B07: k of ten pages are there already; with all ten only the metadata row travels."""
    with Cluster(*sides(GQA, "page=16", "page=16")) as cluster:
        total, _ = carry(cluster, 160, prefix=prefix)
        assert total == (160 - prefix) * 5 * 2 * 4 * 3 * 2


def test_interleaved_tokens_in_two_chunks_are_all_sent_once():
    """Field note B15: a cached prefix is sent early, the rest later, to four ranks that own token i % 4."""
    with Cluster(*sides(MLA, "page=32", "dcp=4,page=8")) as cluster:
        total, wanted = carry(cluster, 131, chunk_pages=3)
        assert total == wanted


@pytest.mark.parametrize(("tp", "other"), [(2, 1), (1, 2), (2, 4)])
def test_state_of_several_groups_is_sharded_group_by_group(tp, other):
    """Field note B12: a state of three groups (6, 6, 10) side by side in one item, each with heads of its own."""
    groups = (Item("q", 3, 2), Item("k", 3, 2), Item("v", 5, 2))
    model = ModelShape("m", (Block("kv", (0,), KV), Block("mamba", (0,), groups, Slot(), per="request")))
    with Cluster(*sides(model, f"tp={tp}", f"tp={other}")) as cluster:
        total, wanted = carry(cluster, 20)
        assert total == wanted


@pytest.mark.parametrize("digest", ["off", "sample"])
def test_a_state_list_that_the_sender_lacks_fails_the_room_on_both_sides(digest):
    (source,), (target,) = sides(HYBRID, "page=16", "page=16")
    with Cluster([source], [target], digest=digest) as cluster:
        sender = KVSender(cluster.prefill[0].manager, None, 5)
        sender.init(2, num_tokens=30)
        with pytest.raises(InputError, match=r"room 5: state_indices name \['mamba'\] with page 1 of 2"):
            sender.send([0], {"mamba": [1]})
        sender.send([0], {"mamba": [], "swa": []})  # says nothing of them
        with pytest.raises(InputError, match=r"state_indices\['swa'\] has 1 pages, tokens 0 to 30 needs 2"):
            sender.send([1], {"swa": [1], "mamba": [2]})
        sender.send([1], {"mamba": [2]})
        receiver = KVReceiver(cluster.decode[0].manager, None, 5, peers=[cluster.prefill[0].manager.endpoint])
        receiver.init()
        receiver.send_metadata([0, 1], state_indices={"swa": [0, 1], "mamba": [0]}, num_tokens=30)
        for room in (sender, receiver):
            assert room.wait(5) is KVPoll.Failed
            plan = "prefill page list of space 'swa' is empty, the request needs slots 0 to 29"
            canary = "page list of space 'swa' is too short for the request: its length is 0"
            assert "noticed by prefill" in str(room.failure())
            assert plan in str(room.failure()) or (digest != "off" and canary in str(room.failure()))


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_any_tensor_parallel_sizes_below_and_above_the_heads(heads):
    """Field note B11."""
    model = attention("m", layers=2, kv_heads=heads, head_dim=3)
    for prefill in (1, 2, 4, 8):
        for decode in (1, 2, 4, 8):
            with Cluster(*sides(model, f"tp={prefill}", f"tp={decode},order=hnd")) as cluster:
                total, wanted = carry(cluster, 33)
                assert total == wanted, (prefill, decode)


def test_of_a_window_only_the_pages_that_are_kept_are_listed():
    """A list of all pages would be read as one of the last ones: it is refused, on both sides."""
    (ours,), (theirs,) = sides(SLIDING, "page=16", "page=16")
    with Cluster([ours], [theirs]) as cluster:
        sender = KVSender(cluster.prefill[0].manager, None, 5)
        with pytest.raises(InputError, match=r"tokens 0 to 130 need 3 pages of 16 tokens, .*Window.*, 9 were given"):
            sender.init(9, num_tokens=130)
        with pytest.raises(InputError, match=r"num_tokens is needed, .*'kv'.*Window\(tokens=33\)"):
            sender.init(3)
        receiver = KVReceiver(cluster.decode[0].manager, None, 5, peers=[cluster.prefill[0].manager.endpoint])
        receiver.init()
        with pytest.raises(InputError, match=r"need 3 pages of 16 tokens, .*Window.*, 9 were given"):
            receiver.send_metadata(range(9), num_tokens=130)
        with pytest.raises(InputError, match="num_tokens is needed"):
            receiver.send_metadata(range(3))


def test_the_list_of_a_rank_with_a_share_of_the_tokens_is_counted():
    """Token i lies at rank i % 2: 20 of 40 tokens are 3 pages of 8."""
    ours, theirs = sides(MLA, "dcp=2,page=8", "dcp=2,page=8")
    with Cluster(ours[:1], theirs[:1]) as cluster:
        words = r"tokens 0 to 40 need 3 pages of 8 tokens, .*Cyclic.*, 2 were given"
        sender = KVSender(cluster.prefill[0].manager, None, 5)
        receiver = KVReceiver(cluster.decode[0].manager, None, 5, peers=[cluster.prefill[0].manager.endpoint])
        receiver.init()
        with pytest.raises(InputError, match=words):
            sender.init(2, num_tokens=40)
        with pytest.raises(InputError, match=words):
            receiver.send_metadata([1, 2], num_tokens=40)


def test_rows_in_the_main_space_are_refused():
    rows = ModelShape("m", (Block("kv", (0,), (Item("row", 2),), Rows()),))
    with pytest.raises(LayoutError, match="space 'kv' has coverage Rows"):
        ClusterRank("decode", layouts_of(rows, parse_grid(""), 8)[0], (), (), "local", {})


def test_a_prefill_rank_that_is_named_twice_is_one():
    with Cluster(*sides(GQA, "tp=2,page=16", "page=16")) as cluster:
        for room, name in ((5, "127.0.0.1"), (6, "localhost")):
            first = cluster.prefill[0].manager
            more = [f"{name}:{first.endpoint.rpartition(':')[2]}"]
            total, wanted = carry(cluster, 40, more=more, room=room)
            assert total == wanted


def test_a_rank_that_holds_no_token_of_a_short_request_is_no_obstacle():
    (sources, (whole,)) = sides(GQA, "cp=4,deal=contiguous,page=16", "page=16")
    assert isinstance(sources[3].spaces[0].deal, Ranges)
    with Cluster(sources, [whole]) as cluster:
        for room, num_tokens in ((5, 1), (6, 16), (7, 17), (8, 49)):
            carry(cluster, num_tokens, room=room)


def test_what_lies_between_items_is_not_touched():
    """Field note B18: 576 bytes of payload, the block scales at their end, at a stride of 640."""
    model = attention("m", layers=1, kv_heads=4, head_dim=9)
    padded = []
    for layout in (layouts_of(model, parse_grid("page=16"), 40)[0], layouts_of(model, parse_grid("page=16"), 40)[0]):
        tensors, at = [], 0
        for tensor in layout.tensors:
            strides = msgspec.structs.replace(tensor.strides_bytes, page=tensor.item_bytes + 64)
            nbytes = strides.page * tensor.pages
            tensors.append(msgspec.structs.replace(tensor, strides_bytes=strides, nbytes=nbytes, address=at))
            at += nbytes
        padded.append(msgspec.structs.replace(layout, tensors=tuple(tensors)))
    with Cluster([padded[0]], [padded[1]]) as cluster:
        carry(cluster, 100)
        assert np.count_nonzero(cluster.decode[0].memory.buffer == 0xEE) > 40 * 64
