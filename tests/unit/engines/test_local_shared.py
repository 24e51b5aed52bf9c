"""Shared memory: who is given it, how its addresses are found, why it is not taken, and that nothing stays behind."""

import gc
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvferry import allocate_pool
from kvferry.engines.local import LocalEngine, blob, shares
from kvferry.engines.local.shared_link import SharedLink
from kvferry.engines.seam import Outcome, Region
from kvferry.errors import PoolError
from kvferry.testing.suite import EngineSuite
from kvferry.testing.suite_memory import PLAIN
from kvferry.testing.suite_pair import GUARD, Pair, open_end

MEMFD = "kvferry.testing.suite_memory:memfd"
POOL = 1 << 20


def make_pair(writer="auto", target="auto", memory=MEMFD):
    made = Pair(
        open_end(LocalEngine(), 1, POOL, {"mechanism": writer}),
        open_end(LocalEngine(), 2, POOL, {"mechanism": target}, memory),
    )
    made.writer.pool[:] = np.random.default_rng(3).integers(0, 256, POOL, np.uint8)
    return made


@pytest.fixture
def pair():
    made = make_pair()
    yield made
    made.close()


@pytest.fixture
def suite():
    made = EngineSuite()
    made.options, made.memory = {"mechanism": "auto"}, MEMFD
    made.setup_method()
    yield made
    made.teardown_method()


def attach(pair, raw=None):
    pair.target.grant(pair.writer.me)
    return pair.settle(pair.writer.engine.attach(pair.target.me, raw or pair.target.engine.describe()))


def explained(pair):
    return pair.writer.engine.explain(pair.target.me)


def assert_falls_back(pair, reason, raw=None):
    """It attaches by cross-memory attach, writes, and keeps the reason against shared memory."""
    assert attach(pair, raw).outcome is Outcome.LANDED
    assert explained(pair).startswith("cma (ready); shm: ")
    assert reason in explained(pair)
    assert pair.write(pair.batch([1], [2], [100])).outcome is Outcome.LANDED
    assert np.array_equal(pair.target.pool[2:102], pair.writer.pool[1:101])


def test_memory_in_shared_pools_is_mapped_and_both_sides_say_so(pair):
    assert attach(pair).outcome is Outcome.LANDED
    assert explained(pair) == "shm (ready)"
    assert pair.writer.engine.info()["peers"] == {str(pair.target.me): "shm (ready)"}
    assert pair.target.engine.info()["writers"] == {str(pair.writer.me): "shm"}
    assert pair.target.engine.info()["shared_memory"] == "offered"
    assert "not in a shared pool" in pair.writer.engine.info()["shared_memory"]
    assert pair.write(pair.batch([5, 50], [70, 7], [20, 30])).outcome is Outcome.LANDED
    expected = np.full(POOL, GUARD, np.uint8)
    expected[70:90], expected[7:37] = pair.writer.pool[5:25], pair.writer.pool[50:80]
    assert np.array_equal(pair.target.pool, expected)


def test_memory_outside_of_shared_pools_is_not_and_says_what_to_do():
    pair = make_pair(memory=PLAIN)
    assert_falls_back(pair, "the peer's memory is not in a shared pool")
    assert f"{POOL} bytes at {pair.target.address:#x}" in explained(pair)
    assert "allocate_pool(kind='memfd')" in explained(pair)
    pair.close()


def test_shared_memory_alone_does_not_fall_back():
    pair = make_pair("shm", "auto", PLAIN)
    done = attach(pair)
    assert done.outcome is Outcome.FAILED_QUIET
    assert "allocate_pool(kind='memfd')" in done.cause
    assert "cma" not in done.cause
    pair.close()


def test_one_region_outside_of_the_pools_is_enough():
    pair = make_pair()
    other = np.zeros(4096, np.uint8)
    pair.target.engine.register([Region(pair.target.address, POOL), Region(other.ctypes.data, 4096)])
    assert_falls_back(pair, f"4096 bytes at {other.ctypes.data:#x} are not")
    pair.close()


def test_a_target_that_does_not_offer_it_and_one_that_has_no_memory(pair):
    other = make_pair("shm", "cma")
    assert "does not offer shared memory" in attach(other).cause
    other.close()
    pair.target.engine.register([])
    assert "registered no memory" in attach(make_writer_of("shm", pair)).cause


def make_writer_of(mechanism, pair):
    """The same target with another writer, which is closed with the test."""
    writer = open_end(LocalEngine(), 3, POOL, {"mechanism": mechanism})
    made = Pair(writer, pair.target)
    pair.writer.engine.close()
    pair.writer = writer
    return made


def test_a_writer_of_a_mechanism_that_is_not_offered_is_told_so():
    pair = make_pair("cma", "shm")
    assert "does not offer cross-memory attach" in attach(pair).cause
    forged = msgspec.structs.replace(
        blob.decode(pair.target.engine.describe()), nonce_address=1 << 20, nonce_digest=b"x" * 32
    )
    assert attach(pair, blob.encode(forged)).outcome is Outcome.FAILED_QUIET
    pair.close()


# rows


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(POOL - 5, 6), (POOL, 1), (-1, 1), (-(1 << 30), 8), (1 << 40, 8)],
    ids=["past the end", "behind", "before", "far before", "far behind"],
)
def test_a_row_outside_of_the_shared_memory_is_refused_by_number_and_nothing_is_written(pair, offset, nbytes):
    attach(pair)
    batch = pair.batch([0, 0, 0], [0, 100, 200], [10, 10, nbytes])
    batch.dst[2] = pair.target.address + offset
    done = pair.write(batch)
    assert (done.outcome, done.native) == (Outcome.FAILED_QUIET, "refused")
    assert "row 2 of 3" in done.cause
    assert hex(pair.target.address + offset) in done.cause
    assert (pair.target.pool == GUARD).all()
    assert pair.write(pair.batch([0], [0], [10])).outcome is Outcome.LANDED


def test_a_part_of_the_pool_that_is_not_registered_is_outside(pair):
    start = pair.target.address
    pair.target.engine.register([Region(start, 1000), Region(start + 2000, 1000)])
    attach(pair)
    for at, nbytes, outcome in (
        (990, 10, Outcome.LANDED), (990, 11, Outcome.FAILED_QUIET), (1500, 1, Outcome.FAILED_QUIET),
        (900, 1200, Outcome.FAILED_QUIET), (2000, 1000, Outcome.LANDED),
    ):  # fmt: skip
        assert pair.write(pair.batch([0], [at], [nbytes])).outcome is outcome, at


def test_many_pools_with_many_pieces_are_found_each_at_its_place(pair):
    pools = [allocate_pool(40_000, kind="memfd") for _ in range(70)]
    random = np.random.default_rng(1)
    for pool in pools:
        pool.array[:] = GUARD
    regions = [Region(pool.address + 100 * number, 90) for pool in pools for number in range(3)]
    random.shuffle(regions)
    pair.target.engine.register(regions)
    attach(pair)
    assert explained(pair) == "shm (ready)"
    where, at = random.integers(0, 70, 1000), random.integers(0, 3, 1000) * 100
    rows = np.unique(np.stack([where, at]), axis=1)
    where, at = rows[:, random.permutation(rows.shape[1])]
    expected = [pool.array.copy() for pool in pools]
    src, nbytes = random.integers(0, POOL - 90, len(at)), random.integers(1, 90, len(at))
    for pool, there, here, size in zip(where, at, src, nbytes, strict=True):
        expected[pool][there : there + size] = pair.writer.pool[here : here + size]
    batch = pair.batch(src, at, nbytes)
    batch.dst[:] = np.array([pools[pool].address for pool in where], np.uint64) + at.astype(np.uint64)
    assert pair.write(batch).outcome is Outcome.LANDED
    assert all(np.array_equal(pool.array, after) for pool, after in zip(pools, expected, strict=True))


def test_more_pieces_than_are_accepted_are_a_reason(pair, monkeypatch):
    monkeypatch.setattr(shares, "MAX_PARTS", 10)
    pair.target.engine.register([Region(pair.target.address + 100 * number, 90) for number in range(11)])
    assert_falls_back(pair, "11 separate pieces, more than 10")


def test_registering_again_replaces_what_is_shared(pair):
    attach(pair)
    pair.target.engine.register([Region(pair.target.address, 100)])
    assert pair.write(pair.batch([0], [200], [10])).outcome is Outcome.LANDED  # by the earlier attachment
    attach(pair)
    assert pair.write(pair.batch([0], [200], [10])).outcome is Outcome.FAILED_QUIET
    assert pair.write(pair.batch([0], [90], [10])).outcome is Outcome.LANDED


# refusals


def changed(pair, **values):
    return blob.encode(msgspec.structs.replace(blob.decode(pair.target.engine.describe()), **values))


def test_a_blob_of_another_host_or_with_another_token_is_refused_and_the_token_is_counted():
    pair = make_pair("shm", "shm")
    assert "another host" in attach(pair, changed(pair, host="elsewhere")).cause
    done = attach(pair, changed(pair, token=bytes(32)))
    assert done.outcome is Outcome.FAILED_QUIET
    assert "the proof is wrong" in done.cause
    assert pair.target.engine.info()["garbage"] == 1
    assert pair.target.engine.info()["writers"] == {}
    pair.close()


def test_a_probe_that_does_not_arrive_is_found_by_the_target(pair, monkeypatch):
    monkeypatch.setattr(SharedLink, "_write_probe", lambda *_: None)
    assert_falls_back(pair, "did not arrive")


def test_a_pool_that_could_shrink_is_not_mapped(pair, monkeypatch):
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, POOL)
    monkeypatch.setattr(shares, "shared_pools", lambda: [(pair.target.address, POOL, fd)])
    pair.target.engine.register([Region(pair.target.address, POOL)])
    os.close(fd)
    assert_falls_back(pair, "not sealed")


def test_a_descriptor_that_is_no_memfd_is_not_mapped(pair, monkeypatch):
    with Path("/dev/zero").open("rb") as zero:
        monkeypatch.setattr(shares, "shared_pools", lambda: [(pair.target.address, POOL, zero.fileno())])
        pair.target.engine.register([Region(pair.target.address, POOL)])
    assert_falls_back(pair, "can't be mapped: EINVAL")


def test_no_page_for_the_probe_is_a_reason(pair, monkeypatch):
    def full(*_, **__):
        raise PoolError("no memory at all")

    monkeypatch.setattr("kvferry.engines.local.probe.allocate_pool", full)
    assert_falls_back(pair, "no page for a probe: no memory at all")


# descriptors


def test_a_writer_without_descriptors_for_the_pools_falls_back_and_says_so(pair, few_descriptors):
    pools = [allocate_pool(4096, kind="memfd") for _ in range(60)]
    pair.target.engine.register([Region(pool.address, 4096) for pool in pools] + [Region(pair.target.address, POOL)])
    raw = pair.target.engine.describe()
    few_descriptors(30)
    assert_falls_back(pair, "limit on open files is reached (ulimit -n)", raw)


def test_a_target_without_descriptors_for_copies_says_so(pair, few_descriptors):
    pools = [allocate_pool(4096, kind="memfd") for _ in range(60)]
    few_descriptors(30)
    before = len(os.listdir("/proc/self/fd"))
    pair.target.engine.register([Region(pool.address, 4096) for pool in pools] + [Region(pair.target.address, POOL)])
    assert len(os.listdir("/proc/self/fd")) <= before
    assert_falls_back(pair, "can't be duplicated: EMFILE; raise the limit on open files")


def test_a_pool_that_is_closed_while_it_is_registered_stays_shared():
    pool = allocate_pool(POOL, kind="memfd")
    array = np.asarray(pool)
    pair = make_pair()
    pair.target.engine.register([Region(pool.address, POOL)])
    pool.close()
    attach(pair)
    assert explained(pair) == "shm (ready)"
    batch = pair.batch([0], [0], [100])
    batch.dst[0] = array.ctypes.data
    assert pair.write(batch).outcome is Outcome.LANDED
    assert np.array_equal(array[:100], pair.writer.pool[:100])
    pair.close()


# what is left


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:kvferry-pool")


def test_detaching_unmaps_the_targets_memory(pair):
    before = mappings()
    attach(pair)
    assert mappings() > before
    pair.writer.engine.detach(pair.target.me)
    until = time.monotonic() + 5
    while mappings() > before + 1 and time.monotonic() < until:  # one more: the target's probe page
        gc.collect()
        time.sleep(0.01)
    assert mappings() <= before + 1


def test_a_killed_target_leaves_nothing_behind_and_its_writer_fails(suite):
    gc.collect()
    names, mapped = set(os.listdir("/dev/shm")), mappings()
    process = suite.spawn(4 << 20)
    process.do("grant", peer=[1, 0], claim=7)
    assert suite.settled_attach(process).outcome is Outcome.LANDED
    writer = suite.pair.writer.engine
    assert writer.explain(process.peer) == "shm (ready)"
    assert suite.write_to(process).outcome is Outcome.LANDED
    process.kill()
    done = suite.write_to(process)
    assert done.outcome is Outcome.FAILED_QUIET
    assert "has ended" in done.cause or "closed" in done.cause
    assert set(os.listdir("/dev/shm")) == names
    until = time.monotonic() + 5
    while mappings() > mapped and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert mappings() <= mapped
    assert blob.decode(process.blob).unix not in Path("/proc/net/unix").read_text()


def test_a_killed_writer_leaves_the_targets_memory_as_it_is(suite):
    process = suite.flooding()
    assert suite.pair.target.engine.info()["writers"] == {str(process.peer): "shm"}
    process.kill()
    suite.assert_still_for(0.1)
    until = time.monotonic() + 5
    while suite.pair.target.engine.info()["writers"] and time.monotonic() < until:
        time.sleep(0.01)
    assert suite.pair.target.engine.info()["writers"] == {}


def test_a_batch_that_was_copied_for_a_target_that_has_ended_meanwhile_has_not_landed(pair, monkeypatch):
    attach(pair)
    link = pair.writer.engine._attachments[pair.target.me].link
    copy = link._copy

    def copy_and_lose(batch):
        found = copy(batch)
        link._lose("the peer's process (pid 1) has ended")
        return found

    monkeypatch.setattr(link, "_copy", copy_and_lose)
    done = pair.write(pair.batch([0], [0], [10]))
    assert done.outcome is Outcome.FAILED_QUIET
    assert "10 bytes were copied, but meanwhile the peer's process" in done.cause
