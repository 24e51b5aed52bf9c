"""The registry alone: hand-made time, no I/O."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.bootstrap.records import (
    MAX_ENTRY_CHARS,
    ConflictError,
    RankEntry,
    RefusedError,
    check_token,
    grid_ranks,
    rank_count,
    renew_due,
)
from kvferry.bootstrap.registry import Registry
from kvferry.errors import BootstrapError, ConfigError
from kvferry.ids import Rank

HOSTILE = (-1, 2**31, 2**63, 2**64, -(2**63), 10**5000)


FIRST, ONE = Rank(), Rank(1, 1, 1, 1)


def bits(value):
    return f"{value.bit_length()}bits" if isinstance(value, int) else None


def entry(rank=FIRST, sizes=ONE, incarnation=1, epoch=0, port=7000, **more):
    return RankEntry(rank, sizes, f"tcp://10.0.0.1:{port}", "digest", incarnation, epoch, **more)


def code_of(call, *args):
    with pytest.raises(RefusedError) as caught:
        call(*args)
    assert isinstance(caught.value, BootstrapError)
    assert caught.value.hint
    return caught.value.code


def test_an_empty_registry_knows_no_grid_and_is_not_ready():
    registry = Registry(instance="one")
    topology = registry.topology(None, 0.0)
    assert (topology.sizes, topology.entries, topology.missing) == (None, (), ())
    assert (topology.generation, topology.instance, topology.complete) == (0, "one", False)
    assert registry.ready(0.0) == (False, ())
    assert registry.counts(0.0) == (0, 0)


@pytest.mark.parametrize(
    "sizes",
    [Rank(*s) for s in ((1, 1, 1, 1), (2, 1, 1, 4), (4, 2, 1, 2), (2, 2, 2, 2), (1, 4, 1, 1), (1, 1, 4, 4))],
)
def test_every_rank_of_a_grid_is_missing_until_it_registers_and_counted_once(sizes):
    registry = Registry()
    ranks = list(grid_ranks(sizes))
    assert len(set(ranks)) == len(ranks) == rank_count(sizes)
    for index, rank in enumerate(ranks):
        assert not registry.ready(0.0)[0]
        for _ in range(3):  # a renewal is not another rank
            registry.register(entry(rank, sizes, incarnation=index), 0.0)
        assert registry.ready(0.0) == (index + 1 == len(ranks), tuple(ranks[index + 1 :]))
        assert registry.counts(0.0) == (index + 1, len(ranks))
    topology = registry.topology(None, 0.0)
    assert [found.rank for found in topology.entries] == ranks
    assert [found.incarnation for found in topology.entries] == list(range(len(ranks)))
    assert topology.complete


def test_a_dp_rank_is_looked_up_alone_and_out_of_range_is_refused():
    registry = Registry()
    sizes = Rank(2, 1, 1, 2)
    registry.register(entry(Rank(dp=1, tp=1), sizes), 0.0)
    topology = registry.topology(1, 0.0)
    assert [found.rank for found in topology.entries] == [Rank(dp=1, tp=1)]
    assert topology.missing == (Rank(dp=1, tp=0),)
    assert registry.topology(0, 0.0).missing == (Rank(dp=0, tp=0), Rank(dp=0, tp=1))
    for dp in (2, *HOSTILE):
        assert code_of(registry.topology, dp, 0.0) == "outside_grid"


def test_the_first_entry_fixes_the_sizes_until_all_are_gone():
    registry = Registry(ttl_s=10.0)
    small, large = Rank(1, 1, 1, 2), Rank(1, 1, 1, 4)
    registry.register(entry(Rank(tp=0), small), 0.0)
    with pytest.raises(RefusedError, match=r"dp1 pp1 cp1 tp4, .*dp1 pp1 cp1 tp2") as caught:
        registry.register(entry(Rank(tp=1), large), 9.0)
    assert caught.value.code == "sizes_differ"
    assert registry.sizes == small
    assert registry.register(entry(Rank(tp=1), large), 10.0) == "added"
    assert registry.sizes == large


def test_a_refused_first_entry_fixes_nothing():
    registry = Registry()
    assert code_of(registry.register, entry(Rank(tp=4), Rank(1, 1, 1, 4)), 0.0) == "outside_grid"
    assert registry.sizes is None
    assert registry.generation == 0


def test_a_rank_held_by_another_live_incarnation_is_refused_naming_both():
    registry = Registry(ttl_s=10.0)
    registry.register(entry(incarnation=0xAB, port=7001), 0.0)
    with pytest.raises(ConflictError) as caught:
        registry.register(entry(incarnation=0xCD, port=7002), 4.0)
    text = str(caught.value)
    for part in (
        f"{0xAB:016x}",
        f"{0xCD:016x}",
        "10.0.0.1:7001",
        "10.0.0.1:7002",
        "dp0 pp0 cp0 tp0",
        "6.0 s",
    ):
        assert part in text
    assert caught.value.code == "conflict"
    (held,) = registry.topology(None, 4.0).entries
    assert held.incarnation == 0xAB


def test_a_refused_rival_does_not_renew_the_holder():
    registry = Registry(ttl_s=10.0)
    registry.register(entry(incarnation=1), 0.0)
    assert code_of(registry.register, entry(incarnation=2), 9.9) == "conflict"
    assert registry.register(entry(incarnation=2), 10.0) == "added"


def test_the_same_incarnation_renews_and_updates():
    registry = Registry(ttl_s=10.0)
    assert registry.register(entry(), 0.0) == "added"
    assert registry.register(entry(), 9.0) == "renewed"
    assert registry.generation == 1
    assert registry.register(entry(port=7001), 18.0) == "updated"
    assert registry.register(entry(port=7001, epoch=1), 27.0) == "updated"
    assert registry.generation == 3
    (held,) = registry.topology(None, 36.9).entries
    assert (held.endpoint, held.epoch) == ("tcp://10.0.0.1:7001", 1)
    assert registry.topology(None, 37.0).entries == ()


def test_an_older_epoch_that_arrives_late_is_refused():
    registry = Registry()
    registry.register(entry(epoch=2, port=7002), 0.0)
    assert code_of(registry.register, entry(epoch=1, port=7001), 1.0) == "stale_epoch"
    assert registry.topology(None, 1.0).entries[0].endpoint == "tcp://10.0.0.1:7002"


def test_expired_entries_behind_a_live_one_go_too():
    registry = Registry(ttl_s=10.0)
    sizes = Rank(1, 1, 1, 4)
    for tp in range(4):
        registry.register(entry(Rank(tp=tp), sizes, incarnation=tp), 0.0)
    registry.register(entry(Rank(tp=0), sizes, incarnation=0), 5.0)
    before = registry.generation
    assert registry.expire(10.0) == 3
    assert registry.generation == before + 1
    assert [found.rank for found in registry.topology(None, 10.0).entries] == [Rank(tp=0)]
    assert registry.expire(10.0) == 0
    assert registry.expire(15.0) == 1
    assert registry.sizes is None


def test_a_late_farewell_does_not_remove_the_successor():
    registry = Registry(ttl_s=10.0)
    registry.register(entry(incarnation=1), 0.0)
    registry.register(entry(incarnation=2), 10.0)
    generation = registry.generation
    assert registry.unregister(Rank(), 1, 11.0) is False
    assert registry.unregister(Rank(tp=9), 2, 11.0) is False
    assert registry.generation == generation
    assert registry.unregister(Rank(), 2, 11.0) is True
    assert registry.generation == generation + 1
    assert registry.counts(11.0) == (0, 0)


def test_the_generation_tells_a_restart_that_left_no_gap():
    registry = Registry()
    registry.register(entry(incarnation=1), 0.0)
    kept = registry.topology(None, 0.0).generation
    registry.unregister(Rank(), 1, 1.0)
    registry.register(entry(incarnation=2), 1.0)
    assert registry.topology(None, 1.0).generation != kept


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("size", [0, 65537, *HOSTILE], ids=bits)
def test_hostile_sizes_are_refused_cheaply(axis, size):
    sizes = [1, 1, 1, 1]
    sizes[axis] = size
    assert code_of(Registry().register, entry(sizes=Rank(*sizes)), 0.0) == "bad_sizes"


def test_the_product_of_the_sizes_is_bounded():
    assert Registry().register(entry(sizes=Rank(16, 16, 16, 16)), 0.0) == "added"
    assert code_of(Registry().register, entry(sizes=Rank(16, 16, 16, 17)), 0.0) == "bad_sizes"


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("at", [2, *HOSTILE], ids=bits)
def test_a_rank_outside_of_the_sizes_is_refused_naming_both(axis, at):
    rank = [0, 0, 0, 0]
    rank[axis] = at
    with pytest.raises(RefusedError, match="dp2 pp2 cp2 tp2") as caught:
        Registry().register(entry(Rank(*rank), Rank(2, 2, 2, 2)), 0.0)
    assert caught.value.code == "outside_grid"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("field", ["incarnation", "epoch"])
@pytest.mark.parametrize("value", [-1, 2**64, -(2**63), 10**5000], ids=bits)
def test_identities_have_64_bits(field, value):
    with pytest.raises(RefusedError, match=field):
        Registry().register(entry(**{field: value}), 0.0)
    assert Registry().register(entry(**{field: 2**64 - 1}), 0.0) == "added"


@pytest.mark.parametrize(
    "endpoint",
    ["", "tcp://", "tcp://h", "tcp://h:", "tcp://h:0", "tcp://h:65536", "tcp://h:-1", "http://h:1", "h:1",
     "tcp://::1:5",      "tcp://a b:1", "tcp://h:1\n", "tcp://h:1/x", "tcp://h:\u0661",
     "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://*:1",
     "x" * 9999],
)  # fmt: skip
def test_an_endpoint_that_no_peer_can_reach_is_refused(endpoint):
    bad = RankEntry(Rank(), Rank(1, 1, 1, 1), endpoint, "", 1, 0)
    with pytest.raises(RefusedError, match="endpoint") as caught:
        Registry().register(bad, 0.0)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "endpoint", ["tcp://[::1]:5", "tcp://[fe80::1%eth0]:5", "tcp://node-1.x_y:65535", "tcp://1.2.3.4:1"]
)
def test_a_usable_endpoint_is_taken(endpoint):
    assert Registry().register(RankEntry(Rank(), Rank(1, 1, 1, 1), endpoint, "", 1, 0), 0.0) == "added"


def test_an_entry_that_carries_too_much_text_is_refused():
    assert Registry().register(entry(extra={"k": "v" * (MAX_ENTRY_CHARS - 100)}), 0.0) == "added"
    for key, value in (("k", "v" * MAX_ENTRY_CHARS), ("k" * MAX_ENTRY_CHARS, "v")):
        with pytest.raises(RefusedError, match=str(MAX_ENTRY_CHARS)):
            Registry().register(entry(extra={key: value}), 0.0)


@pytest.mark.parametrize("name", ["ttl_s", "room_ttl_s", "max_rooms"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_a_registry_with_senseless_limits_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        Registry(**{name: value})


def test_rooms_are_found_until_they_expire_and_the_newest_put_wins():
    registry = Registry(room_ttl_s=100.0)
    registry.put_rooms({1: 0, 2: 1}, 0.0)
    assert registry.query_rooms([1, 2, 3, 1], 99.0) == {1: 0, 2: 1}
    registry.put_rooms({2: 3}, 99.0)
    assert registry.query_rooms([1, 2], 100.0) == {2: 3}
    assert registry.query_rooms([2], 199.0) == {}
    assert registry.query_rooms([], 0.0) == {}


def test_rooms_are_checked_against_the_grid_and_stored_all_or_none():
    registry = Registry()
    registry.register(entry(sizes=Rank(2, 1, 1, 1)), 0.0)
    for dp in (2, *HOSTILE):
        assert code_of(registry.put_rooms, {1: 0, 2: dp}, 0.0) == "outside_grid"
    for room in (-1, 2**64, 10**5000):
        assert code_of(registry.put_rooms, {1: 0, room: 0}, 0.0) == "bad_room"
        assert code_of(registry.query_rooms, [room], 0.0) == "bad_room"
    assert registry.query_rooms([1, 2], 0.0) == {}
    registry.put_rooms({0: 1, 2**64 - 1: 1}, 0.0)
    assert registry.query_rooms([0, 2**64 - 1], 0.0) == {0: 1, 2**64 - 1: 1}


def test_rooms_are_bounded_and_old_ones_make_place():
    registry = Registry(room_ttl_s=80.0, max_rooms=3)
    registry.put_rooms({1: 0, 2: 0, 3: 0}, 0.0)
    registry.put_rooms({1: 1, 3: 1}, 1.0)  # no new room, no new place
    with pytest.raises(RefusedError, match=r"4 remembered rooms, more than 3") as caught:
        registry.put_rooms({1: 5, 4: 5}, 2.0)
    assert caught.value.code == "rooms_full"
    assert registry.query_rooms([1, 4], 2.0) == {1: 1}
    registry.put_rooms({4: 2, 5: 2, 6: 2}, 90.0)
    assert registry.query_rooms(range(9), 90.0) == {4: 2, 5: 2, 6: 2}


def test_a_renewal_is_due_early_enough_to_lose_two():
    assert renew_due(None, 0.0, 9.0)
    assert not renew_due(0.0, 2.9, 9.0)
    assert renew_due(0.0, 3.0, 9.0)


@pytest.mark.parametrize("token", ["", " hush", "hush ", "hush\nhush", "hushä", "hush\x00", "hush\tx"])
def test_a_token_that_a_header_cannot_carry_is_refused_without_showing_it(token):
    with pytest.raises(ConfigError) as caught:
        check_token(token)
    assert "hush" not in str(caught.value)
    check_token(None)
    check_token("s3cret/+= ~")


size = st.integers() | st.integers(0, 20) | st.integers(1, 65537)


@given(size, size, size, size)
def test_any_sizes_are_taken_or_refused_by_the_rule(dp, pp, cp, tp):
    allowed = min(dp, pp, cp, tp) >= 1 and dp * pp * cp * tp <= 65536
    new = entry(sizes=Rank(dp, pp, cp, tp))
    if allowed:
        assert Registry().register(new, 0.0) == "added"
    else:
        assert code_of(Registry().register, new, 0.0) == "bad_sizes"


TTL = 10.0
SIZES = (Rank(2, 1, 1, 2), Rank(1, 2, 1, 1))


class Registrations(RuleBasedStateMachine):
    """Against a model that keeps every accepted registration and its time, for ever."""

    def __init__(self):
        super().__init__()
        self.registry = Registry(ttl_s=TTL)
        self.now = 0.0
        self.held = {}  # rank -> (entry, renewed at)
        self.seen = {}  # generation -> live set

    def live(self):
        return {rank: kept for rank, (kept, at) in self.held.items() if self.now < at + TTL}

    @rule(
        sizes=st.sampled_from(SIZES),
        index=st.integers(0, 3),
        incarnation=st.integers(1, 3),
        epoch=st.integers(0, 2),
    )
    def register(self, sizes, index, incarnation, epoch):
        ranks = list(grid_ranks(sizes))
        new = entry(ranks[index % len(ranks)], sizes, incarnation, epoch)
        live = self.live()
        old = live.get(new.rank)
        expected = None
        if any(kept.sizes != sizes for kept in live.values()):
            expected = "sizes_differ"
        elif old is not None and old.incarnation != incarnation:
            expected = "conflict"
        elif old is not None and epoch < old.epoch:
            expected = "stale_epoch"
        if expected:
            assert code_of(self.registry.register, new, self.now) == expected
        else:
            outcome = "added" if old is None else "renewed" if old == new else "updated"
            assert self.registry.register(new, self.now) == outcome
            self.held[new.rank] = (new, self.now)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), incarnation=st.integers(1, 3))
    def unregister(self, data, incarnation):
        rank = data.draw(st.sampled_from(sorted(self.held)))
        old = self.live().get(rank)
        removed = self.registry.unregister(rank, incarnation, self.now)
        assert removed == (old is not None and old.incarnation == incarnation)
        if removed:
            del self.held[rank]

    @rule(by=st.sampled_from([0.5, 3.0, 9.0, 10.0, 25.0]))
    def wait(self, by):
        self.now += by

    @invariant()
    def shows_exactly_the_live_ranks(self):
        live = self.live()
        topology = self.registry.topology(None, self.now)
        assert {found.rank: found for found in topology.entries} == live
        assert len(topology.entries) == len(live)
        if live:
            assert {kept.sizes for kept in live.values()} == {topology.sizes}
            assert sorted([*live, *topology.missing]) == list(grid_ranks(topology.sizes))
        else:
            assert topology.sizes is None

    @invariant()
    def one_generation_means_one_live_set(self):
        live = {(kept.rank, kept.incarnation, kept.epoch) for kept in self.live().values()}
        generation = self.registry.topology(None, self.now).generation
        assert self.seen.setdefault(generation, live) == live
        assert generation == max(self.seen)


Registrations.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRegistrations = Registrations.TestCase
