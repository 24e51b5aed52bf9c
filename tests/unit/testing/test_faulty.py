"""The engine that misbehaves on command, around the local engine: each command does what it says, and no more."""

import time

import numpy as np
import pytest

from kvferry.engines.local import LocalEngine
from kvferry.engines.seam import Limits, Outcome
from kvferry.testing import Faulty
from kvferry.testing.faulty import FaultyEmbedded
from kvferry.testing.suite_pair import GUARD, Pair, open_end

POOL = 1 << 16


@pytest.fixture(params=["cma", "tcp"])
def pair(request):
    options = {"mechanism": request.param}
    made = Pair(open_end(FaultyEmbedded(), 1, POOL, options), open_end(LocalEngine(), 2, POOL, options))
    made.writer.pool[:] = np.random.default_rng(1).integers(0, 256, POOL, np.uint8)
    assert made.attach().outcome is Outcome.LANDED
    yield made
    made.close()


def outcome_within(pair, ticket, seconds):
    try:
        return pair.settle(ticket, seconds).outcome
    except TimeoutError:
        return None


def test_what_is_held_lands_when_it_is_released(pair):
    faulty = pair.writer.engine
    faulty.hold()
    ticket = pair.submit(pair.batch([0], [0], [100]))
    assert outcome_within(pair, ticket, 0.1) is None
    assert (faulty.held, faulty.info()["held"]) == (1, 1)
    assert (pair.target.pool == GUARD).all()
    faulty.release()
    assert pair.settle(ticket).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool[:101], [*pair.writer.pool[:100], GUARD])
    assert faulty.held == 0


def test_a_quiet_failure_has_its_words_writes_nothing_and_concerns_so_many_batches(pair):
    pair.writer.engine.fail_quiet("no such page", count=2)
    for _ in range(2):
        done = pair.write(pair.batch([0], [0], [100]))
        assert (done.outcome, done.cause, done.native) == (Outcome.FAILED_QUIET, "no such page", "EFAULTY")
    assert (pair.target.pool == GUARD).all()
    assert pair.write(pair.batch([0], [0], [100])).outcome is Outcome.LANDED


def test_an_unknown_failure_lands_after_release_and_is_then_quiet(pair):
    pair.writer.engine.fail_unknown()
    ticket = pair.submit(pair.batch([0], [0], [100]))
    assert pair.settle(ticket).outcome is Outcome.FAILED_UNKNOWN
    assert (pair.target.pool == GUARD).all()
    pair.writer.engine.release()
    assert pair.settle(ticket).outcome is Outcome.QUIET
    assert np.array_equal(pair.target.pool[:100], pair.writer.pool[:100])


def test_an_unknown_failure_whose_write_fails_is_quiet_when_that_one_is(pair):
    pair.writer.engine.fail_unknown()
    ticket = pair.submit(pair.batch([0], [0], [100]))
    assert pair.settle(ticket).outcome is Outcome.FAILED_UNKNOWN
    pair.writer.engine.detach(pair.target.me)
    pair.writer.engine.release()
    assert pair.settle(ticket).outcome is Outcome.QUIET
    assert (pair.target.pool == GUARD).all()


def test_a_delayed_batch_lands_after_its_time_while_one_poll_waits_for_it(pair):
    pair.writer.engine.delay(0.2)
    begun = time.monotonic()
    ticket = pair.submit(pair.batch([0], [0], [100]))
    found = []
    while not found and time.monotonic() < begun + 10:
        found = pair.writer.engine.poll(5)
    assert [(done.ticket, done.outcome) for done in found] == [(ticket, Outcome.LANDED)]
    assert 0.19 < time.monotonic() - begun < 4
    pair.writer.engine.delay(0)
    assert pair.write(pair.batch([0], [0], [100])).outcome is Outcome.LANDED


@pytest.mark.parametrize("nbytes", [[100], [1], [50, 60, 70]])
def test_one_byte_is_wrong_is_called_landed_and_the_source_stays(pair, nbytes):
    source = pair.writer.pool.copy()
    starts = np.arange(len(nbytes)) * 1000
    expected = pair.target.pool.copy()
    for start, length in zip(starts, nbytes, strict=True):
        expected[start : start + length] = source[start : start + length]
    pair.writer.engine.flip_byte()
    assert pair.write(pair.batch(starts, starts, nbytes)).outcome is Outcome.LANDED
    assert np.flatnonzero(pair.target.pool != expected).tolist() == [nbytes[0] - 1]
    assert np.array_equal(pair.writer.pool, source)
    assert pair.write(pair.batch(starts, starts, nbytes)).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool, expected)


def test_a_batch_that_can_not_be_altered_is_written_as_it_is_and_the_next_one_is_altered(pair, monkeypatch):
    faulty = pair.writer.engine
    monkeypatch.setattr(type(faulty), "limits", Limits(rows=2))
    faulty.flip_byte()
    assert pair.write(pair.batch([], [], [])).outcome is Outcome.LANDED
    assert pair.write(pair.batch([0, 100], [0, 100], [10, 10])).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool[100:110], pair.writer.pool[100:110])
    monkeypatch.setattr(type(faulty), "limits", Limits(rows=3))
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED
    assert np.flatnonzero(pair.target.pool[:10] != pair.writer.pool[:10]).tolist() == [9]


def test_where_all_bytes_are_the_same_no_wrong_one_is_found(pair):
    pair.writer.pool[:] = 7
    pair.writer.engine.flip_byte()
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED
    assert (pair.target.pool[:10] == 7).all()
    pair.writer.pool[-1] = 9
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED
    assert pair.target.pool[:10].tolist() == [7] * 9 + [9]


def test_mixed_up_halves_are_called_landed(pair):
    pair.writer.engine.mix_up()
    assert pair.write(pair.batch([0], [0], [100])).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool[:100], np.roll(pair.writer.pool[:100], 50))


def test_what_goes_beyond_the_seam_is_the_wrapped_engines(pair):
    assert pair.writer.engine.explain(pair.target.me).split()[1] == "(ready)"
    with pytest.raises(AttributeError, match="no_such_call"):
        pair.writer.engine.no_such_call  # noqa: B018


def test_it_wraps_any_engine():
    class Odd:
        name = "odd"
        limits = Limits(rows=5)

    assert (Faulty(Odd()).name, Faulty(Odd()).limits.rows) == ("odd", 5)
