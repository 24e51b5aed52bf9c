"""Ranks that see different sets of rooms make the same collective calls and decide about the same rooms."""

import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import KVPoll, poll_group


class Room:
    def __init__(self, state, safe):
        self.state, self.safe = state, safe

    def poll(self):
        return self.state

    def is_release_safe(self):
        return self.safe


class Ranks:
    """An all-reduce in memory; a call with another shape than the others' is an error, as in a real one."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=10)
        self.values = [None] * count
        self.calls = 0

    def reducer(self, rank):
        def reduce(array):
            self.values[rank] = array
            self.barrier.wait()
            assert len({value.shape for value in self.values}) == 1
            found = np.minimum.reduce(self.values)
            if self.barrier.wait() == 0:
                self.calls += 1
            return found

        return reduce

    def poll(self, rooms_of):
        found = [None] * len(rooms_of)

        def run(rank):
            found[rank] = poll_group(rooms_of[rank], self.reducer(rank))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(rooms_of))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found


def test_the_lowest_state_counts_and_release_needs_all():
    states = [(KVPoll.Success, True), (KVPoll.Transferring, True)]
    found = Ranks(2).poll([{7: Room(*states[0])}, {7: Room(*states[1])}])
    assert found[0] == found[1] == {7: (KVPoll.Transferring, True)}
    found = Ranks(2).poll([{7: Room(KVPoll.Failed, True)}, {7: Room(KVPoll.Success, False)}])
    assert found[0] == found[1] == {7: (KVPoll.Failed, False)}


def test_equal_sets_take_two_collectives_and_empty_ones_join():
    ranks = Ranks(3)
    rooms = {room: Room(KVPoll.Success, True) for room in range(500)}
    assert ranks.poll([rooms] * 3)[0].keys() == rooms.keys()
    assert ranks.calls == 2
    assert ranks.poll([{}, rooms, {}]) == [{}, {}, {}]
    assert Ranks(2).poll([{}, {}]) == [{}, {}]


rooms_of_a_rank = st.sets(st.one_of(st.integers(0, 40), st.integers(0, 2**62)), max_size=200)


@settings(max_examples=60, deadline=None)
@given(st.lists(rooms_of_a_rank, min_size=2, max_size=4), st.sets(st.integers(0, 2**62), max_size=100))
def test_every_rank_finds_the_intersection(sets, everywhere):
    sets = [rooms | everywhere for rooms in sets]
    found = Ranks(len(sets)).poll([{room: Room(KVPoll.Success, True) for room in rooms} for rooms in sets])
    shared = set.intersection(*sets)
    for one in found:
        assert list(one) == sorted(shared)


def test_a_rank_with_many_rooms_beside_ranks_with_none_comes_to_an_end():
    ranks = Ranks(3)
    many = {room: Room(KVPoll.Success, True) for room in range(2000)}
    assert ranks.poll([{}, many, {}]) == [{}, {}, {}]
    assert ranks.calls < 10


def test_one_room_less_costs_a_few_collectives_not_one_for_each_room():
    every = {room: Room(KVPoll.Success, True) for room in range(500)}
    for missing in (0, 250, 499):
        ranks = Ranks(2)
        fewer = {room: state for room, state in every.items() if room != missing}
        found = ranks.poll([every, fewer])
        assert list(found[0]) == list(found[1]) == sorted(fewer)
        assert ranks.calls < 10
