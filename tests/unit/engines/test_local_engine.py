"""The local engine's calls: options, order of use, registration, and iovecs."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines.grants import GrantTable
from kvferry.engines.local import LocalEngine
from kvferry.engines.local.iovec import Cursor, row_at, vectors_of
from kvferry.engines.seam import Batch, Caps, EngineConfig, Outcome, Region
from kvferry.errors import ConfigError, EngineError
from kvferry.ids import PeerId


def opened(**options):
    engine = LocalEngine()
    engine.open(EngineConfig(PeerId(1), GrantTable(), options=options))
    return engine


@pytest.mark.parametrize(
    ("mechanism", "caps"),
    [
        ("auto", Caps.FENCE | Caps.ANY_THREAD | Caps.GRANTS | Caps.BLOCKING),
        ("shm", Caps.FENCE | Caps.ANY_THREAD | Caps.BLOCKING),
        ("cma", Caps.FENCE | Caps.ANY_THREAD | Caps.BLOCKING),
        ("tcp", Caps.FENCE | Caps.ANY_THREAD | Caps.GRANTS),
    ],
)
def test_capabilities_are_those_of_the_mechanism(mechanism, caps):
    engine = opened(mechanism=mechanism)
    assert engine.caps == caps
    assert bool(engine.info()["tcp_port"]) == (mechanism in {"auto", "tcp"})
    engine.close()


@pytest.mark.parametrize(("option", "match"), [({"mechansim": "tcp"}, "'mechansim'"), ({"mechanism": "rdma"}, "rdma")])
def test_an_unknown_option_or_value_is_refused_and_the_engine_can_still_be_opened(option, match):
    engine = LocalEngine()
    with pytest.raises(ConfigError, match=match):
        engine.open(EngineConfig(PeerId(1), GrantTable(), options=option))
    engine.open(EngineConfig(PeerId(1), GrantTable()))
    with pytest.raises(EngineError, match="open already"):
        engine.open(EngineConfig(PeerId(1), GrantTable()))
    engine.close()


def test_calls_before_open_and_after_close_say_so_and_close_may_be_called_at_any_time():
    engine = LocalEngine()
    engine.close()
    for call in (engine.describe, lambda: engine.poll(0), lambda: engine.fence(PeerId(2))):
        with pytest.raises(EngineError, match="not open"):
            call()
    engine.open(EngineConfig(PeerId(1), GrantTable()))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="not open"):
        engine.attach(PeerId(2), b"")


@pytest.mark.parametrize("region", [Region(0, 10, device=0), Region(-1, 10), Region(10, -1), Region(2**64 - 5, 10)])
def test_a_region_that_can_not_be_registered_is_named(region):
    engine = opened()
    with pytest.raises(EngineError, match="region 1"):
        engine.register([Region(4096, 10), region])
    engine.close()


def test_registering_again_replaces():
    engine = opened()
    pool = np.arange(100, dtype=np.uint8)
    engine.register([Region(pool.ctypes.data, 100)])
    engine.register([Region(pool.ctypes.data, 50)])
    engine.attach(PeerId(1), engine.describe())  # to itself
    assert engine.poll(5)[0].outcome is Outcome.LANDED
    start = np.array([pool.ctypes.data], np.uint64)
    for nbytes, outcome in ((10, Outcome.LANDED), (60, Outcome.FAILED_QUIET)):
        ticket = engine.submit(PeerId(1), Batch(start, start, np.array([nbytes], np.uint64), nbytes))
        done = engine.poll(5)
        assert [(one.ticket, one.outcome) for one in done] == [(ticket, outcome)]
    engine.close()


def test_poll_with_no_budget_does_not_wait_and_an_idle_one_waits_its_budget():
    engine = opened()
    before = time.monotonic()
    assert engine.poll(0) == []
    assert time.monotonic() - before < 1
    before = time.monotonic()
    assert engine.poll(0.2) == []
    assert time.monotonic() - before > 0.19
    engine.close()


def test_a_blob_is_small():
    engine = opened()
    assert len(engine.describe()) < 1024
    engine.close()


def test_attaching_again_replaces_the_first_attachment():
    target = LocalEngine()
    target.open(EngineConfig(PeerId(2), GrantTable()))
    engine = opened()
    for _ in range(3):
        ticket = engine.attach(PeerId(2), target.describe())
        done = []
        while not done:
            done = engine.poll(1)
        assert [(one.ticket, one.outcome) for one in done] == [(ticket, Outcome.LANDED)]
    first, second = engine.attach(PeerId(2), target.describe()), engine.attach(PeerId(2), target.describe())
    outcomes = {}
    while len(outcomes) < 2:
        outcomes |= {done.ticket: done.outcome for done in engine.poll(1)}
    assert outcomes == {first: Outcome.FAILED_QUIET, second: Outcome.LANDED}
    assert target.info()["writers"] == {str(PeerId(1)): "cma"}
    engine.close()
    target.close()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=30), st.data())
def test_a_cursor_walks_through_the_same_bytes_whatever_the_counts(rows, data):
    addresses = np.array([address for address, _ in rows], np.uint64)
    nbytes = np.array([size for _, size in rows], np.uint64)
    expected = [byte for address, size in rows for byte in range(address, address + size)]
    cursor = Cursor(vectors_of(addresses, nbytes), len(expected))
    walked = []
    while cursor.left:
        ahead = [byte for base, size in cursor.window().tolist() for byte in range(base, base + size)]
        count = data.draw(st.integers(1, len(ahead)))
        walked += ahead[:count]
        cursor.advance(count)
    assert walked == expected
    assert len(cursor.window()) == 0


def test_neighbours_are_merged_and_the_row_of_a_byte_is_found():
    vectors = vectors_of(np.array([0, 10, 20, 50], np.uint64), np.array([10, 10, 5, 1], np.uint64))
    assert vectors.tolist() == [[0, 25], [50, 1]]
    assert [row_at(np.array([10, 10, 5], np.uint64), at) for at in (0, 9, 10, 24)] == [0, 0, 1, 2]
