"""Exactly one of each set of replicas sends."""

import pytest

from kvferry.ids import Rank
from kvferry.layout import Cyclic
from kvferry.plan import Election, elect, fan_in, holding
from kvferry.presets import layer_major, mla


def mha(tp, of, kv_heads=2, **rest):
    h0 = tp * kv_heads // of
    heads = (h0, max((tp + 1) * kv_heads // of, h0 + 1))
    shape = {"layers": 2, "kv_heads": kv_heads, "head_dim": 4, "dtype": "uint8", "pages": 2, "page_tokens": 4}
    return layer_major("m", **shape, rank=Rank(tp=tp), heads=heads, **rest)


def latent(tp, cp=0, **rest):
    shape = {"layers": 2, "latent_dim": 4, "dtype": "uint8", "pages": 2, "page_tokens": 4}
    return mla("m", **shape, rank=Rank(cp=cp, tp=tp), **rest)


def elected(dst, sources, room):
    return [i for i, share in enumerate(elect(dst, sources, room)) if share.elected]


def test_a_source_without_common_heads_is_not_involved():
    shares = elect(mha(0, 2), [mha(0, 2), mha(1, 2)], room=1)
    assert [(s.involved, s.elected) for s in shares] == [(True, True), (False, False)]


def test_sources_with_different_parts_are_all_elected():
    assert elected(mha(0, 1), [mha(0, 2), mha(1, 2)], room=5) == [0, 1]


def test_of_replicas_the_own_rank_index_is_elected_whatever_the_room():
    sources = [latent(tp) for tp in range(4)]
    assert [elected(latent(2), sources, room) for room in range(5)] == [[2]] * 5
    assert all(share.involved for share in elect(latent(2), sources, 0))


def test_without_the_own_rank_index_rooms_are_spread_over_replicas():
    sources = [latent(tp) for tp in range(2)]
    assert [elected(latent(3), sources, room) for room in range(4)] == [[0], [1], [0], [1]]


def test_more_ranks_than_heads_elect_one_for_each_head():
    sources = [mha(tp, 4) for tp in range(4)]
    assert elected(mha(0, 1), sources, room=0) == [0, 2]
    assert elected(mha(1, 2), sources, room=1) == [3], "heads 1 are held by ranks 2 and 3"


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


def test_holding_is_equal_for_equal_parts_and_none_for_nothing():
    assert holding(mha(0, 4), mha(0, 1)) == holding(mha(1, 4), mha(0, 1)) != holding(mha(2, 4), mha(0, 1))
    assert holding(mha(0, 2), mha(1, 2)) is None
