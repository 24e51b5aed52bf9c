"""Long writes over Mooncake, which are waited for without a loop: all rows, what fails, and how long one sleeps."""

import time

import numpy as np
import pytest
from mooncake_here import MIB, opened, with_process

from engine_here import need
from kvferry.engines.mooncake import at_rest
from kvferry.engines.mooncake.instance import Instance, Place
from kvferry.engines.seam import Outcome, Region
from kvferry.plan.batch import Batch

need("mooncake")

PLACE = Place("127.0.0.1", "tcp", "", 5)
NBYTES = 16 * MIB


class Ends:
    """Two instances of the library and their memory."""

    def __init__(self):
        self.source = np.random.default_rng(1).integers(0, 255, NBYTES, np.uint8)
        self.target = np.zeros(NBYTES, np.uint8)
        self.writer, self.reader = Instance(PLACE), Instance(PLACE)
        for instance, memory in ((self.writer, self.source), (self.reader, self.target)):
            instance.register((Region(memory.ctypes.data, NBYTES),))

    def write(self, src, dst, nbytes):
        """Rows by offsets."""
        src = np.array(src, np.int64) + self.source.ctypes.data
        dst = np.array(dst, np.int64) + self.target.ctypes.data
        sizes = np.array(nbytes, np.uint64)
        batch = Batch(src.astype(np.uint64), dst.astype(np.uint64), sizes, int(sizes.sum()))
        return self.writer.write(self.reader.session, [batch])


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.writer.close()
    made.reader.close()


@pytest.fixture
def calls(monkeypatch):
    """What each long write was told to sleep, and returned."""
    made = []
    write = at_rest.write

    def counted(engine, session, rows, pace, timeout_s):
        rest_s = pace.rest_s(sum(rows.nbytes))
        made.append((rest_s, write(engine, session, rows, pace, timeout_s)))
        return made[-1][1]

    monkeypatch.setattr(at_rest, "write", counted)
    return made


@pytest.mark.parametrize("rows", [1, 2, 256, 1024])
def test_every_row_is_there_when_it_returns(ends, calls, rows):
    size = NBYTES // rows
    for turn in range(4):
        ends.target[:] = 0
        order = np.random.default_rng(turn).permutation(rows)
        assert ends.write(order * size, np.arange(rows) * size, [size] * rows) == 0
        assert (ends.target.reshape(rows, size) == ends.source.reshape(rows, size)[order]).all()
    assert len(calls) == 4
    assert calls[0][0] == 0
    assert all(0 < rest_s <= at_rest.REST_MOST_S for rest_s, _ in calls[1:])


@pytest.mark.parametrize("sizes", [[0, MIB], [MIB, 0], [MIB, 0, 3 * MIB + 1, 0]])
def test_rows_of_nothing_are_written_at_once(ends, calls, sizes):
    starts = [4 * MIB * number for number in range(len(sizes))]
    assert ends.write(starts, starts, sizes) == 0
    for start, size in zip(starts, sizes, strict=True):
        assert (ends.target[start : start + size] == ends.source[start : start + size]).all()
    assert len(calls) == 1


def test_a_short_write_is_one_call(ends, calls):
    assert ends.write([0, 100], [0, 100], [100, 100]) == 0
    assert ends.write([0], [0], [at_rest.FROM_BYTES - 1]) == 0
    assert not calls
    assert ends.write([0], [0], [at_rest.FROM_BYTES]) == 0
    assert calls == [(0, 0)]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_row_that_is_not_registered_fails_the_write_wherever_it_stands(ends, calls, wrong):
    elsewhere = np.zeros(MIB, np.uint8)
    starts, targets = [0, 2 * MIB, 4 * MIB], [0, 2 * MIB, 4 * MIB]
    targets[wrong] = elsewhere.ctypes.data - ends.target.ctypes.data
    assert ends.write(starts, targets, [MIB] * 3) != 0
    assert calls[0][1] != 0
    assert not elsewhere.any()


def test_a_peer_that_is_not_there_fails_the_write(ends, calls):
    ends.reader.close()
    assert ends.write([0, MIB], [0, MIB], [MIB, MIB]) != 0
    assert ends.write([0], [0], [MIB]) != 0
    assert all(code for _, code in calls)


@pytest.mark.parametrize("rows", [1, 16])
def test_a_stopped_peer_ends_a_write_after_the_time_limit(rows):
    """One row is waited for by asking, with a limit of kvferry's; more by the library, with its own."""
    for suite in opened():
        _, process = with_process(suite)
        process.stop()
        began = time.monotonic()
        done = suite.pair.settle(suite.submit(process, rows, 16 * MIB // rows if rows > 1 else 4 * MIB), 30)
        seconds = time.monotonic() - began
        process.go_on()
        assert done.outcome is Outcome.FAILED_UNKNOWN
        assert 5 <= seconds < 12


def test_nobody_asks_for_four_fifths_of_what_the_fastest_of_the_last_writes_took():
    pace = at_rest.Pace()
    assert pace.rest_s(1 << 30) == 0
    pace.saw(100 * MIB, 0.1, overslept=False)
    assert pace.rest_s(10 * MIB) == pytest.approx(0.008)
    pace.saw(100 * MIB, 10.0, overslept=False)
    assert pace.rest_s(10 * MIB) == pytest.approx(0.008)
    for _ in range(4):
        pace.saw(100 * MIB, 0.2, overslept=False)
    assert pace.rest_s(10 * MIB) == pytest.approx(0.016)


def test_after_a_write_that_was_over_before_it_was_asked_for_the_next_is_asked_for_earlier():
    pace = at_rest.Pace()
    pace.saw(100 * MIB, 0.2, overslept=True)
    assert pace.rest_s(10 * MIB) == pytest.approx(0.016 / 1.25)


def test_after_a_peer_that_was_stopped_nobody_sleeps_as_long_again():
    pace = at_rest.Pace()
    pace.saw(64 * MIB, 9.0, overslept=False)
    assert pace.rest_s(64 * MIB) == at_rest.REST_MOST_S
    pace.saw(64, 0.0, overslept=True)  # a clock that did not move
    assert pace.rest_s(64 * MIB) < 1


def test_long_rows_are_cut_but_never_into_more_rows_than_the_library_takes():
    whole = at_rest.Rows([0, 5], [7, 9], [MIB, 100])
    assert at_rest.cut(whole) is whole
    assert at_rest.cut(at_rest.Rows([0], [7], [2 * MIB + 1])) == (
        [0, MIB, 2 * MIB],
        [7, 7 + MIB, 7 + 2 * MIB],
        [MIB, MIB, 1],
    )
    many = at_rest.Rows(list(range(1023)), list(range(1023)), [1] * 1022 + [7 * MIB])
    assert [nbytes for nbytes in at_rest.cut(many).nbytes if nbytes > 1] == [4 * MIB, 3 * MIB]
    many = at_rest.Rows(list(range(1021)), list(range(1021)), [1] * 1020 + [7 * MIB])
    assert [nbytes for nbytes in at_rest.cut(many).nbytes if nbytes > 1] == [2 * MIB] * 3 + [MIB]
