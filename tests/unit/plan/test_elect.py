"""Exactly one of each set of replicas sends."""

import msgspec
import pytest

from kvferry.ids import Rank
from kvferry.layout import Cyclic, Field, Slot, Space, Strides, Tensor
from kvferry.plan import Election, elect, fan_in, holdings
from kvferry.presets import Block, Grid, Item, ModelShape, layer_major, layouts_of, mla


def mha(tp, of, kv_heads=2, **rest):
    h0 = tp * kv_heads // of
    heads = (h0, max((tp + 1) * kv_heads // of, h0 + 1))
    shape = {"layers": 2, "kv_heads": kv_heads, "head_dim": 4, "dtype": "uint8", "pages": 2, "page_tokens": 4}
    return layer_major("m", **shape, rank=Rank(tp=tp), heads=heads, **rest)


def latent(tp, cp=0, **rest):
    shape = {"layers": 2, "latent_dim": 4, "dtype": "uint8", "pages": 2, "page_tokens": 4}
    return mla("m", **shape, rank=Rank(cp=cp, tp=tp), **rest)


def elected(dst, sources, room):
    return [i for i, share in enumerate(elect(dst, sources, room)) if share.sends]


def test_a_source_without_common_heads_is_not_involved():
    shares = elect(mha(0, 2), [mha(0, 2), mha(1, 2)], room=1)
    assert [(s.involved, s.sends) for s in shares] == [(True, {"kv": ("k", "v")}), (False, {})]


def test_sources_with_different_parts_are_all_elected():
    assert elected(mha(0, 1), [mha(0, 2), mha(1, 2)], room=5) == [0, 1]


def test_rooms_are_spread_over_replicas():
    sources = [latent(tp) for tp in range(3)]
    assert [elected(latent(0), sources, room) for room in range(4)] == [[0], [1], [2], [0]]
    assert all(share.involved for share in elect(latent(0), sources, 0))


@pytest.mark.parametrize(
    ("replicas", "claimants", "candidates"),
    [
        (4, 4, [[0], [1], [2], [3]]),  # each to its own index
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (3, 2, [[0], [1, 2]]),
        (2, 3, [[0], [0], [1]]),
    ],
)
def test_ranks_that_want_the_same_turn_to_different_replicas(replicas, claimants, candidates):
    sources, group = ([latent(tp) for tp in range(count)] for count in (replicas, claimants))
    for dst, expected in zip(group, candidates, strict=True):
        election = Election(dst, sources, group)
        found = [[i for i, share in enumerate(election.shares(room)) if share.sends] for room in range(12)]
        assert sorted({each for (each,) in found}) == expected
        assert len({sum(each == [one] for each in found) for one in expected}) == 1, "evenly"


def with_state(layout, heads):
    """The same with a state space whose heads are dealt to TP ranks."""
    last, strides = layout.tensors[-1], Strides(page=8 * (heads[1] - heads[0]), head=8)
    field = Field("ssm", 8, per="request")
    state = Tensor(
        "mamba", (0,), (heads,), (field,), last.address + last.nbytes, 2 * strides.page, strides, strides.page, 2
    )
    spaces = (*layout.spaces, Space("mamba", 1, Cyclic(), Slot()))
    return msgspec.structs.replace(layout, tensors=(*layout.tensors, state), spaces=spaces)


def test_a_space_that_is_replicated_is_sent_once_beside_one_that_is_sharded():
    sources = [with_state(latent(tp), (tp, tp + 1)) for tp in range(2)]
    dst = with_state(latent(0), (0, 2))
    for room in range(4):
        sends = [share.sends for share in elect(dst, sources, room)]
        kv, mamba = {"kv": ("latent",)}, {"mamba": ("ssm",)}
        assert sends == ([kv | mamba, mamba] if room % 2 == 0 else [mamba, kv | mamba])


def test_a_field_that_is_replicated_is_sent_once_beside_one_of_its_space_that_is_sharded():
    model = ModelShape("m", (Block("state", (0, 1), (Item("b", 3, 2), Item("x", 3, 4)), Slot(), per="request"),))
    sources, (dst,) = (layouts_of(model, Grid(tp=tp), 2) for tp in (4, 1))
    for room in range(4):
        fields = [share.sends["state"] for share in elect(dst, sources, room)]
        assert [("b" in each, "x" in each) for each in fields] == [
            (room % 2 == 0, True), (room % 2 == 1, True), (room % 2 == 0, True), (room % 2 == 1, True)
        ]  # fmt: skip


def test_more_ranks_than_heads_elect_one_for_each_head():
    sources = [mha(tp, 4) for tp in range(4)]
    assert elected(mha(0, 1), sources, room=0) == [0, 2]
    assert elected(mha(1, 2), sources, room=1) == [3], "head 1 is held by ranks 2 and 3"


def test_context_parallel_ranks_are_no_replicas_of_each_other():
    sources = [latent(tp, cp, deal=Cyclic(4, 2, cp)) for cp in range(2) for tp in range(2)]
    assert elected(latent(0), sources, room=0) == [0, 2]
    assert elected(latent(1, deal=Cyclic(4, 2, 1)), sources, room=0) == [2]


@pytest.mark.parametrize("room", [0, 1, 7])
def test_an_election_is_the_same_for_every_room_with_the_same_remainder(room):
    sources = [latent(tp) for tp in range(3)]
    election = Election(latent(5), sources)
    assert election.shares(room) == elect(latent(5), sources, room) == election.shares(room + 3)


def test_fan_in_counts_every_destination_that_holds_something_of_the_source():
    assert fan_in(mha(0, 2), [mha(tp, 4) for tp in range(4)]) == 2
    assert fan_in(latent(3), [latent(tp) for tp in range(4)]) == 4


def test_holdings_are_equal_for_equal_parts_and_empty_for_nothing():
    assert holdings(mha(0, 4), mha(0, 1)) == holdings(mha(1, 4), mha(0, 1)) != holdings(mha(2, 4), mha(0, 1))
    assert holdings(mha(0, 2), mha(1, 2)) == {}
