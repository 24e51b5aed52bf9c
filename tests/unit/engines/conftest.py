import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tcp_caller is a module of its own

from tcp_caller import TCP

from kvferry.engines.local import LocalEngine
from kvferry.testing.suite import EngineSuite
from kvferry.testing.suite_pair import Pair, open_end


@pytest.fixture
def few_descriptors():
    """few_descriptors(5): this process can open five more."""
    before, holes = resource.getrlimit(resource.RLIMIT_NOFILE), []

    def limit(count):
        last = max(map(int, os.listdir("/proc/self/fd")))
        holes.append(os.dup(0))
        while holes[-1] < last:
            holes.append(os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (holes[-1] + 1 + count, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for fd in holes:
        os.close(fd)


@pytest.fixture
def pair():
    """A writer and a target by TCP in this process, 8 MiB each, not attached."""
    made = Pair(*[open_end(LocalEngine(), number, 8 << 20, TCP) for number in (1, 2)])
    made.writer.pool[:] = np.random.default_rng(3).integers(0, 256, made.writer.pool.nbytes, np.uint8)
    yield made
    made.close()


@pytest.fixture
def suite():
    """The engine suite's pair and processes, by TCP."""
    made = EngineSuite()
    made.options = TCP
    made.setup_method()
    yield made
    made.teardown_method()
