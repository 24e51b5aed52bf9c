"""How a writer may copy rows into its mapping of a memfd pool (ADR 0008): GB/s, and part of one memcpy of as much.

    python tools/shared_writes.py [--sizes 65536,16384,4096,2048,1048576] [--repeats 9] [--busy] [--engine]

128 MiB in shuffled rows, in batches of 8 MiB, from a private pool into the mapping; the ways take turns, and medians
are shown. With --busy a second Python thread of the process counts all the time. With --engine the local engine writes
into pools of another process, by each mechanism that writes memory itself.
"""

import argparse
import collections
import contextlib
import ctypes
import itertools
import os
import statistics
import threading
import time

import numpy as np

from kvferry import allocate_pool
from kvferry.engines.local import LocalEngine
from kvferry.engines.local.iovec import Cursor, vectors_of
from kvferry.engines.local.shared_link import copy_rows
from kvferry.engines.local.syscalls import read_memory, write_memory
from kvferry.engines.seam import Batch, Outcome, Region
from kvferry.pool import make_present, map_memfd
from kvferry.testing.suite_pair import open_end, wait_for
from kvferry.testing.suite_process import EngineProcess

TOTAL, POOL, BATCH = 128 << 20, 256 << 20, 8 << 20
ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
fast, held = ctypes.CDLL(None).memmove, ctypes.PyDLL(None).memmove
pwrite = ctypes.PyDLL(None).pwrite
for function in (fast, held):
    function.argtypes, function.restype = ARGUMENTS, None
pwrite.argtypes, pwrite.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long), ctypes.c_ssize_t


def exhaust(calls):
    collections.deque(calls, maxlen=0)


def by_vectors(call, src, dst, nbytes):
    total = int(nbytes.sum())
    here, there = Cursor(vectors_of(src, nbytes), total), Cursor(vectors_of(dst, nbytes), total)
    while here.left:
        count = call(here.window(), there.window())
        here.advance(count)
        there.advance(count)


def ways(mapped, fd):
    def loop(function):
        return lambda src, dst, nbytes: exhaust(map(function, dst.tolist(), src.tolist(), nbytes.tolist()))

    def into_file(src, dst, nbytes):
        offsets = (dst - np.uint64(mapped)).tolist()
        exhaust(map(pwrite, itertools.repeat(fd), src.tolist(), nbytes.tolist(), offsets))

    return {
        "memoryview, GIL kept": copy_rows,
        "memmove, GIL kept": loop(held),
        "memmove, GIL let go": loop(fast),
        "process_vm_writev to self": lambda *rows: by_vectors(lambda a, b: write_memory(os.getpid(), a, b), *rows),
        "process_vm_readv from self": lambda *rows: by_vectors(lambda a, b: read_memory(os.getpid(), b, a), *rows),
        "pwrite to the memfd": into_file,
    }


def by_engine(stack, mechanism, memory, source):
    """A way that writes into another process, and where that one's pool lies."""
    options, provider = {"mechanism": mechanism}, f"kvferry.testing.suite_memory:{memory}"
    process = EngineProcess("local", options, 9, POOL, (), provider)
    stack.callback(process.kill)
    engine = open_end(LocalEngine(), 1, 4096, options).engine
    stack.callback(engine.close)
    engine.register([Region(source, POOL)])
    assert wait_for(engine, engine.attach(process.peer, process.blob), 10) is Outcome.LANDED

    def way(src, dst, nbytes):
        engine.submit(process.peer, Batch(src, dst, nbytes, int(nbytes.sum()), 7))
        assert all(done.outcome is Outcome.LANDED for done in engine.poll(0))

    return way, process.address


def batches(size, source, mapped):
    random, rows = np.random.default_rng(1), TOTAL // size
    src, dst = (
        (random.permutation(POOL // size)[:rows] * size).astype(np.uint64) + np.uint64(start)
        for start in (source, mapped)
    )
    per = min(max(BATCH // size, 1), 16384)
    nbytes = np.full(rows, size, np.uint64)
    return [(src[at : at + per], dst[at : at + per], nbytes[at : at + per]) for at in range(0, rows, per)]


def timed(action):
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def compare(size, repeats, found, source, other):
    """Time ways, each given with the place that it writes to."""
    seconds = collections.defaultdict(list)
    parts = {name: batches(size, source, place) for name, (_, place) in found.items()}
    for _ in range(repeats):
        seconds["memcpy"].append(timed(lambda: fast(other, source, TOTAL)))
        for name, (way, _) in found.items():
            seconds[name].append(timed(lambda way=way, name=name: [way(*part) for part in parts[name]]))
    base = statistics.median(seconds["memcpy"])
    print(f"rows of {size} bytes")
    for name, each in seconds.items():
        median = statistics.median(each)
        print(f"  {name:27s} {TOTAL / median / 1e9:6.2f} GB/s  {base / median:5.2f} of memcpy")


def count_for_ever():
    while True:
        for _ in range(1000):
            pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="65536,16384,4096,2048,1048576")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args()
    source, other, pool = allocate_pool(POOL), allocate_pool(TOTAL), allocate_pool(POOL, kind="memfd")
    memory = map_memfd(pool.fd)
    mapped = ctypes.addressof(memory)
    make_present(mapped, POOL)
    print(f"from: {source}\ninto: {pool}")
    with contextlib.ExitStack() as stack:
        found = {name: (way, mapped) for name, way in ways(mapped, pool.fd).items()}
        if options.engine:
            kinds = (("shm", "memfd"), ("cma", "memfd"), ("cma", "private"))
            found = {f"{how} into {memory}": by_engine(stack, how, memory, source.address) for how, memory in kinds}
        if options.busy:
            threading.Thread(target=count_for_ever, daemon=True).start()
        for size in map(int, options.sizes.split(",")):
            compare(size, options.repeats, found, source.address, other.address)


if __name__ == "__main__":
    main()
