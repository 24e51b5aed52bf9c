"""Bad days of memory: unmapped under a write, no descriptor left, limits. The process lives and says why."""

import gc
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry import allocate_pool
from kvferry.engines.grants import GrantTable
from kvferry.engines.local import LocalEngine
from kvferry.engines.seam import Batch, EngineConfig, Outcome, Region
from kvferry.errors import EngineError
from kvferry.ids import PeerId
from kvferry.testing.suite_pair import GUARD, Pair, open_end

POOL = 1 << 20


@pytest.fixture(params=["shm", "cma", "tcp"])
def pair(request):
    options = {"mechanism": request.param}
    made = Pair(open_end(LocalEngine(), 1, POOL, options), open_end(LocalEngine(), 2, POOL, options))
    made.mechanism = request.param
    made.writer.pool[:] = np.random.default_rng(3).integers(0, 256, POOL, np.uint8)
    yield made
    made.close()


def one(address, nbytes=100):
    return np.array([address], np.uint64), np.array([nbytes], np.uint64)


def test_a_target_whose_pool_is_unmapped_under_a_write(pair):
    """Where the kernel or the target looks at its address space it is refused; a shared pool is still there."""
    pool = allocate_pool(POOL, kind="memfd")
    pair.target.engine.register([Region(pool.address, POOL)])
    pair.target.grants.add(pair.writer.me, 7, [pool.address], [pool.address + POOL])
    assert (
        pair.settle(pair.writer.engine.attach(pair.target.me, pair.target.engine.describe())).outcome is Outcome.LANDED
    )
    pool.close()  # only its address was told to anybody: it is unmapped
    src, nbytes = one(pair.writer.address)
    done = pair.write(Batch(src, one(pool.address)[0], nbytes, 100, 7))
    if pair.mechanism == "shm":
        assert done.outcome is Outcome.LANDED
    else:
        assert done.outcome is Outcome.FAILED_QUIET
        assert "EFAULT" in done.cause
        assert "row 0 of 1" in done.cause
    assert (pair.target.pool == GUARD).all()
    assert pair.writer.engine.explain(pair.target.me) == f"{pair.mechanism} (ready)"


@pytest.mark.parametrize("pair", ["cma", "tcp"], indirect=True)
def test_a_source_whose_pool_is_unmapped_fails_that_batch_and_nothing_lands(pair):
    pool = allocate_pool(POOL)
    pair.attach()
    pair.writer.engine.register([Region(pool.address, POOL), Region(pair.writer.address, POOL)])
    pool.close()
    dst, nbytes = one(pair.target.address)
    done = pair.write(Batch(one(pool.address)[0], dst, nbytes, 100, 7))
    assert done.outcome in {Outcome.FAILED_QUIET, Outcome.FAILED_UNKNOWN}
    assert done.cause
    assert (pair.target.pool == GUARD).all()


def refusal(engine, mechanism):
    """What `open` says against it, "" if nothing."""
    try:
        engine.open(EngineConfig(PeerId(1), GrantTable(), options={"mechanism": mechanism}))
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mechanism", ["auto", "shm", "cma", "tcp"])
def test_an_engine_that_finds_no_descriptor_is_not_opened_says_so_and_leaves_nothing(few_descriptors, mechanism):
    few_descriptors(1)  # for the look at what is open
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.listdir("/proc/self/fd")
    for count in range(20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft + count, hard))
        engine = LocalEngine()
        said = refusal(engine, mechanism)
        engine.close()
        gc.collect()
        assert os.listdir("/proc/self/fd") == before
        if not said:
            assert count > 2
            return
        assert f"EMFILE (Too many open files); this process may have {soft + count} files open" in said
        assert "ulimit -n" in said
    raise AssertionError("it was never opened")


def test_an_attach_that_finds_no_descriptor_ends_with_every_reason_and_a_later_one_works(few_descriptors):
    pair = Pair(open_end(LocalEngine(), 1, POOL, {}), open_end(LocalEngine(), 2, POOL, {}))
    raw = pair.target.engine.describe()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few_descriptors(0)
    done = pair.settle(pair.writer.engine.attach(pair.target.me, raw))
    assert done.outcome is Outcome.FAILED_QUIET
    assert "cma: it can't begin: EMFILE (Too many open files)" in done.cause
    assert "tcp: " in done.cause
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert pair.attach().outcome is Outcome.LANDED
    pair.close()


LIMITED = """
import numpy as np
from kvferry.engines.local import LocalEngine
from kvferry.testing.suite_pair import Pair, open_end
pair = Pair(*[open_end(LocalEngine(), n, 1 << 20, {}, "kvferry.testing.suite_memory:memfd") for n in (1, 2)])
assert pair.attach().outcome.value == "landed"
assert pair.write(pair.batch([0], [9], [4096])).outcome.value == "landed"
print(pair.writer.engine.explain(pair.target.me))
pair.close()
"""


def run(*command):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_a_memory_lock_limit_of_0_does_not_matter_to_shared_memory():
    assert run("sh", "-c", 'ulimit -l 0; exec "$@"', "sh", sys.executable, "-c", LIMITED) == "shm (ready)"


FULL = 'mount -t tmpfs -o size=64k full /dev/shm && head -c 64k /dev/zero > /dev/shm/full; exec "$@"'


def can_mount():
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=64k full /dev/shm"]
    return (
        shutil.which("unshare") is not None and not subprocess.run(command, check=False, capture_output=True).returncode
    )


@pytest.mark.skipif(not can_mount(), reason="unshare --mount and mount do not work here")
def test_a_full_dev_shm_does_not_matter_to_shared_memory():
    """A memfd belongs to no mounted file system; what limits it is the machine and the cgroup."""
    command = ["unshare", "--mount", "sh", "-c", FULL, "sh", sys.executable, "-c", LIMITED]
    assert run(*command) == "shm (ready)"
    assert not Path("/dev/shm/full").exists()
