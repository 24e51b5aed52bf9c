"""Pools: what their memory is, how it goes, and what is said when there is none."""

import gc
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kvferry
from kvferry import KVArgs, KvferryError, allocate_pool
from kvferry import pool as pools
from kvferry.api.memory import block_of
from kvferry.errors import InputError, PoolError
from kvferry.free_memory import FreeMemory
from kvferry.presets import page_major

HUGE = 2 << 20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def run(code):
    """Run code in a process of its own; its standard output."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.fixture(params=pools.KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, HUGE, 3 * HUGE + 1])
def test_a_pool_is_zeroed_aligned_and_of_the_size_that_was_asked_for(kind, nbytes):
    with allocate_pool(nbytes, kind=kind) as pool:
        assert (pool.nbytes, pool.kind, pool.address % HUGE) == (nbytes, kind, 0)
        assert pool.array.nbytes == nbytes
        assert pool.array.ctypes.data == pool.address
        assert not pool.array.any()
        pool.array[-1] = 7
        assert np.asarray(pool)[-1] == 7
        assert (pool.fd >= 0) == (kind == "memfd")


def present_kib(address):
    """Resident and huge kB of the mapping at an address, by smaps."""
    found = pools._mapping_at(address)
    return found["Rss"], found["AnonHugePages"], found["Size"]


def test_every_page_is_present_at_once(kind):
    with allocate_pool(3 * HUGE, kind=kind) as pool:
        resident, _, size = present_kib(pool.address)
        assert (resident, size) == (3 * HUGE, 3 * HUGE)


def test_without_populate_write_pages_are_present_as_well(kind, monkeypatch):
    monkeypatch.setattr(pools, "_POPULATE_WRITE", 9999)  # as a kernel before 5.14 has it: EINVAL
    with allocate_pool(3 * HUGE, kind=kind) as pool:
        assert present_kib(pool.address)[0] == 3 * HUGE


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="huge pages are switched off here")
def test_a_private_pool_lies_on_huge_pages_and_says_so():
    with allocate_pool(16 * HUGE) as pool:
        _, huge, size = present_kib(pool.address)
        assert pool.page_bytes == (HUGE if 2 * huge >= size else mmap.PAGESIZE)
        assert huge == size, f"{huge} of {size} bytes lie on huge pages: memory may be fragmented"


def test_the_page_size_is_that_which_smaps_shows(monkeypatch):
    monkeypatch.setattr(pools.mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE)
    with allocate_pool(4 * HUGE) as pool:
        assert pool.page_bytes == mmap.PAGESIZE
        assert repr(pool) == f"<Pool private, {4 * HUGE} bytes at {pool.address:#x}, pages of 4 KiB>"


@pytest.mark.parametrize(("fields", "page"), [
    ({"Size": 100, "AnonHugePages": 50, "KernelPageSize": 4}, HUGE),
    ({"Size": 100, "ShmemPmdMapped": 100, "KernelPageSize": 4}, HUGE),
    ({"Size": 100, "AnonHugePages": 49, "KernelPageSize": 4}, 4),
    ({"Size": 100, "AnonHugePages": 0, "KernelPageSize": 1 << 30}, 1 << 30),
    ({}, 0),
])  # fmt: skip
def test_the_page_size_of_a_mapping(fields, page, monkeypatch):
    monkeypatch.setattr(pools, "_mapping_at", lambda _: fields)
    monkeypatch.setattr(pools, "_huge_page_bytes", lambda: HUGE)
    assert pools.page_bytes_at(1) == page


def test_beyond_a_pool_lies_no_memory_of_others(kind):
    code = (
        f"import kvferry, ctypes; p = kvferry.allocate_pool({HUGE}, kind={kind!r}); "
        "print(p.nbytes, flush=True); ctypes.memset(p.address + p.nbytes, 1, 1)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout.strip() == str(HUGE)
    assert ended.returncode == -11


# its life


def mapped(address):
    return bool(pools._mapping_at(address)) and present_kib(address)[0] > 0


def test_closing_twice_is_fine_and_the_memory_goes_at_once(kind):
    pool = allocate_pool(HUGE, kind=kind)
    address, fd = pool.address, pool.fd
    pool.close()
    pool.close()
    assert not mapped(address)
    assert pool.is_closed
    assert pool.fd == -1
    assert "closed" in repr(pool)
    if fd >= 0:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    for use in (lambda: pool.array, lambda: pool.__array_interface__, lambda: block_of(pool, "buffer 0")):
        with pytest.raises(PoolError, match="closed"):
            use()


def test_an_array_over_a_closed_pool_stays_good(kind):
    pool = allocate_pool(HUGE, kind=kind)
    view, address = pool.array[5:], pool.address
    pool.close()
    view[:] = 9
    assert view.sum() == 9 * (HUGE - 5)
    del view
    gc.collect()
    assert not mapped(address)


def test_what_numpy_made_of_the_pool_itself_stays_good_too(kind):
    pool = allocate_pool(HUGE, kind=kind)
    view, address = np.asarray(pool), pool.address
    pool.close()
    view[:] = 9
    assert view.sum() == 9 * HUGE
    del view, pool
    gc.collect()
    assert not mapped(address)


def test_a_pool_of_which_only_the_array_is_kept_stays_shared_until_that_goes():
    before = pools.shared_pools()
    array = allocate_pool(HUGE, kind="memfd").array
    gc.collect()
    (found,) = [pool for pool in pools.shared_pools() if pool not in before]
    assert found[:2] == (array.ctypes.data, HUGE)
    os.fstat(found[2])
    del array
    gc.collect()
    assert pools.shared_pools() == before


def test_private_pools_are_not_shared():
    before = pools.shared_pools()
    with allocate_pool(HUGE):
        assert pools.shared_pools() == before


def test_another_mapping_of_the_descriptor_is_the_same_memory():
    with allocate_pool(10_000, kind="memfd") as pool:
        (address, nbytes, fd) = pools.shared_pools()[-1]
        assert (address, nbytes, fd) == (pool.address, pool.nbytes, pool.fd)
        with mmap.mmap(fd, nbytes) as other:
            other[9_999] = 77
        assert pool.array[9_999] == 77


def test_pools_are_made_and_closed_by_many_threads_at_once():
    before, seen = pools.shared_pools(), []

    def work():
        for _ in range(20):
            with allocate_pool(4096, kind="memfd") as pool:
                seen.append((pool.address, pool.nbytes, pool.fd) in pools.shared_pools())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 160
    assert pools.shared_pools() == before


def test_a_fork_copies_a_private_pool_and_shares_a_memfd_pool():
    code = """
import os, kvferry
a, b = kvferry.allocate_pool(4096), kvferry.allocate_pool(4096, kind="memfd")
if os.fork() == 0:
    a.array[0] = b.array[0] = 5
    a.close()
    b.close()
    os._exit(0)
os.wait()
print(a.array[0], b.array[0], os.fstat(b.fd).st_size)
"""
    assert run(code) == "0 5 4096"


def test_what_was_mapped_of_another_process_is_not_inherited_by_a_fork():
    code = """
import ctypes, os, kvferry
from kvferry.pool import map_memfd
pool = kvferry.allocate_pool(4096, kind="memfd")
memory = map_memfd(pool.fd)
pid = os.fork()
if pid == 0:
    memory[0] = 5
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), pool.array[0])
memory[0] = 7
print(pool.array[0])
"""
    assert run(code).split() == ["-11", "0", "7"]


# who takes it


def test_kvargs_take_pools_as_they_are(kind):
    layout = page_major("m", layers=2, kv_heads=2, head_dim=16, page_tokens=4, pages=8, dtype="float16")
    with allocate_pool(1 << 20, kind=kind) as pool:
        assert block_of(pool, "buffer 0") == (pool.address, 1 << 20, 1 << 20)
        bound = KVArgs(layout, [pool]).bound()
        assert bound is not layout


# refusals


@pytest.mark.parametrize("nbytes", [0, -1, np.int64(-5)])
def test_a_size_that_is_not_positive_is_refused_with_its_value(nbytes):
    with pytest.raises(InputError, match=f"pool of {nbytes} bytes.*above 0"):
        allocate_pool(nbytes)


@pytest.mark.parametrize("nbytes", [1.5, "4096", None])
def test_a_size_that_is_no_integer_is_refused(nbytes):
    with pytest.raises(InputError, match="no integer"):
        allocate_pool(nbytes)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"'hugetlb'.*private, memfd"):
        allocate_pool(4096, kind="hugetlb")


def test_more_than_there_is_is_refused_with_both_numbers_before_anything_is_taken(kind):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        PoolError, match=rf"a {kind} pool of {1 << 50} bytes does not fit: .* has \d+ bytes free"
    ) as caught:
        allocate_pool(1 << 50, kind=kind)
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, KvferryError)
    assert caught.value.hint
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_twentieth_is_left_to_others(kind, monkeypatch):
    monkeypatch.setattr(pools, "free_memory", lambda: FreeMemory(20 * HUGE, "cgroup /box"))
    allocate_pool(19 * HUGE, kind=kind).close()
    with pytest.raises(PoolError, match=rf"cgroup /box has {20 * HUGE} bytes free"):
        allocate_pool(19 * HUGE + 1, kind=kind)


def limited(limit, value, call, kind):
    code = f"""
import resource, kvferry
kvferry.allocate_pool, kvferry.KvferryError  # what is public is imported when it is used
resource.setrlimit(resource.{limit}, ({value}, {value}))
before = __import__("os").listdir("/proc/self/fd") if {value} > 100 else []
try:
    kvferry.allocate_pool({call}, kind={kind!r})
except kvferry.KvferryError as error:
    print(type(error).__name__, error)
if before:
    assert len(before) == len(__import__("os").listdir("/proc/self/fd"))
"""
    return run(code)


def test_a_memfd_that_can_not_grow_is_a_clear_error():
    said = limited("RLIMIT_FSIZE", 1 << 20, 4 << 20, "memfd")
    assert said.startswith(f"PoolError a memfd pool of {4 << 20} bytes can't be had: EFBIG")
    assert f"the limit of this process is {1 << 20}" in said
    assert "ulimit -f" in said


def test_no_descriptor_for_a_memfd_is_a_clear_error():
    said = limited("RLIMIT_NOFILE", 3, 4096, "memfd")
    assert said.startswith("PoolError a memfd pool of 4096 bytes can't be had: EMFILE")
    assert "the limit of this process is 3 " in said
    assert "ulimit -n" in said


def test_no_address_space_is_a_clear_error(kind):
    said = limited("RLIMIT_AS", 2 << 30, 4 << 30, kind)
    assert said.startswith(f"PoolError a {kind} pool of {4 << 30} bytes can't be had: ENOMEM")
    assert "ulimit -v" in said


def test_a_memory_lock_limit_of_0_does_not_matter(kind):
    assert limited("RLIMIT_MEMLOCK", 0, 4096, kind) == ""


def test_a_refusal_on_the_way_leaves_nothing_behind(kind, monkeypatch):
    before = (len(os.listdir("/proc/self/fd")), pools.shared_pools())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pools, "_touch", full)
    with pytest.raises(PoolError, match=r"ENOSPC.*shared memory is full"):
        allocate_pool(HUGE, kind=kind)
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), pools.shared_pools()) == before


def test_a_populate_that_fails_is_a_refusal_with_the_kernels_word(monkeypatch):
    monkeypatch.setattr(pools, "_POPULATE_WRITE", mmap.MADV_DONTNEED + 10**6)
    monkeypatch.setattr(pools.ctypes, "get_errno", lambda: 14)
    with pytest.raises(PoolError, match="EFAULT"):
        allocate_pool(HUGE)


def statm():
    """Size and resident part of this process in bytes."""
    return [int(word) * mmap.PAGESIZE for word in Path("/proc/self/statm").read_text().split()[:2]]


def test_the_memory_is_given_back_after_many_pools(kind):
    before = statm()
    for _ in range(8):
        allocate_pool(32 << 20, kind=kind).close()
    assert all(after - earlier < 64 << 20 for after, earlier in zip(statm(), before, strict=True))


def test_it_is_part_of_the_interface():
    assert {"Pool", "allocate_pool"} <= set(kvferry.__all__)
