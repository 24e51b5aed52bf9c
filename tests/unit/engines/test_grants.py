"""What peers may write: intervals, counts, drops."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines import intervals
from kvferry.engines.grants import GrantTable
from kvferry.engines.intervals import Intervals
from kvferry.errors import InputError
from kvferry.ids import PeerId

PEER = PeerId(1)
OTHER = PeerId(2)


@pytest.fixture
def table():
    made = GrantTable()
    made.add(PEER, 7, [1000, 3000, 2000], [2000, 4000, 2500])
    return made


def test_a_row_that_spans_two_touching_pages_is_inside(table):
    assert table.begin(PEER, 7, [1990], [500]) == ""


def test_a_row_that_spans_a_gap_is_refused_by_its_number(table):
    why = table.begin(PEER, 7, [1000, 2400], [1, 700])
    assert "row 1 of 2" in why
    assert not table.in_use(PEER, None)


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [(999, 1), (999, 2), (4000, 1), (3999, 2), (0, 1 << 63), (1500, 0), (1500, 2**64 - 1)],
)
def test_rows_outside_of_no_bytes_or_past_the_address_space_are_refused(table, address, nbytes):
    assert "row 0" in table.begin(PEER, 7, [address], [nbytes])


@pytest.mark.parametrize(("addresses", "lengths"), [([-1], [1]), ([1 << 64], [1]), (["x"], [1]), ([1000], [1, 2])])
def test_what_is_not_an_array_of_addresses_is_refused_and_not_raised(table, addresses, lengths):
    assert table.begin(PEER, 7, addresses, lengths)
    assert not table.in_use(PEER, 7)


def test_another_peer_and_another_claim_have_no_part_in_a_grant(table):
    assert "granted nothing" in table.begin(OTHER, 7, [1000], [1])
    assert "granted nothing" in table.begin(PEER, 8, [1000], [1])


def test_a_dropped_grant_admits_nothing_and_is_forgotten_when_its_last_write_has_ended(table):
    assert table.begin(PEER, 7, [1000], [1]) == ""
    assert table.begin(PEER, 7, [1001], [1]) == ""
    table.drop(PEER, 7)
    assert table.begin(PEER, 7, [1000], [1])
    table.end(PEER, 7)
    assert table.in_use(PEER, 7)
    assert len(table) == 1
    table.end(PEER, 7)
    assert not table.in_use(PEER, None)
    assert len(table) == 0


def test_dropping_a_peer_drops_all_its_claims_and_nobody_elses(table):
    table.add(PEER, 8, [1], [2])
    table.add(OTHER, 7, [1000], [1001])
    table.drop(PEER, None)
    assert len(table) == 1
    assert table.begin(OTHER, 7, [1000], [1]) == ""


def test_a_claim_may_be_granted_more_but_not_again_while_its_dropped_write_runs(table):
    table.add(PEER, 7, [4000], [5000])
    assert table.begin(PEER, 7, [3900], [200]) == ""
    table.drop(PEER, 7)
    with pytest.raises(InputError, match="claim 7"):
        table.add(PEER, 7, [1], [2])


@pytest.mark.parametrize(
    ("starts", "ends", "match"),
    [
        ([1, 2], [3], "2 starts and 1 ends"),
        ([5], [4], "interval 0"),
        ([-1], [4], "starts"),
        ([[1]], [[2]], "dim"),
    ],
)
def test_a_grant_that_makes_no_sense_is_refused(starts, ends, match):
    with pytest.raises(InputError, match=match):
        GrantTable().add(PEER, 1, starts, ends)


def test_a_large_grant_is_checked_without_a_python_loop():
    pages = np.arange(200_000, dtype=np.uint64) * np.uint64(8192)
    table = GrantTable()
    table.add(PEER, 1, pages, pages + np.uint64(4096))
    rows = np.random.default_rng(1).permutation(pages)[:16384]
    assert table.begin(PEER, 1, rows, np.full(len(rows), 4096, np.uint64)) == ""
    rows[777] += 1
    assert "row 777 of 16384" in table.begin(PEER, 1, rows, np.full(len(rows), 4096, np.uint64))


def test_threads_that_begin_and_end_while_a_grant_is_dropped_leave_nothing_behind(table):
    admitted = []

    def write():
        while table.begin(PEER, 7, [1000], [10]) == "":
            admitted.append(1)
            table.end(PEER, 7)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(admitted) < 100:
        pass
    table.drop(PEER, 7)
    for thread in threads:
        thread.join(10)
    assert len(table) == 0
    assert not table.in_use(PEER, None)


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=8)


@given(spans, st.lists(st.tuples(st.integers(0, 70), st.integers(0, 20)), max_size=8))
def test_intervals_equal_a_set_of_addresses(granted, rows):
    # touching intervals are one, so a row is inside when each of its addresses is
    inside = {address for start, size in granted for address in range(start, start + size)}
    starts = np.array([start for start, _ in granted], np.uint64)
    intervals = Intervals.merged(starts, starts + np.array([size for _, size in granted], np.uint64))
    bad = [n for n, (start, size) in enumerate(rows) if not size or not inside.issuperset(range(start, start + size))]
    found = intervals.first_outside(
        np.array([start for start, _ in rows], np.uint64), np.array([size for _, size in rows], np.uint64)
    )
    assert found == (bad[0] if bad else None)
    assert (intervals.starts[1:] > intervals.ends[:-1]).all()


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=5),
    st.lists(st.tuples(st.integers(0, 100) | st.integers(2**64 - 9, 2**64 - 1), st.integers(0, 20)), max_size=6),
)
def test_few_rows_are_looked_at_one_by_one_and_found_as_many_are(spans, rows):
    starts, ends = (np.array(column, np.uint64) for column in ([a for a, _ in spans], [a + n for a, n in spans]))
    held = Intervals.merged(starts, ends)
    addresses, nbytes = (np.array([row[column] for row in rows], np.uint64) for column in (0, 1))
    few = held.first_outside(addresses, nbytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "_FEW", -1)
        assert held.first_outside(addresses, nbytes) == few
