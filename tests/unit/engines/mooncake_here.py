"""Mooncake's engine for tests: the engine suite's pair and processes over it."""

from pathlib import Path

import numpy as np

from kvferry.engines.seam import Batch, Outcome
from kvferry.testing.suite import EngineSuite

MIB = 1 << 20
FAST = {"timeout_s": "5"}


class Suite(EngineSuite):
    """The engine suite's pair and processes."""

    __test__ = False
    engine_name = "mooncake"
    options = FAST

    @property
    def engine(self):
        return self.pair.writer.engine

    def submit(self, process, rows=16, row_bytes=MIB, first=0):
        """Rows of the writer's pool to the process's pool, one after the other from byte `first` on."""
        offsets = np.arange(rows, dtype=np.uint64) * np.uint64(row_bytes)
        src = np.full(rows, self.pair.writer.address, np.uint64) + offsets % np.uint64(4 * MIB)
        dst = offsets + np.uint64(process.address + first)
        return self.engine.submit(process.peer, Batch(src, dst, np.full(rows, row_bytes, np.uint64), rows * row_bytes))

    def quiet(self, ticket, limit_s=20.0):
        """Wait until the writer says QUIET for a ticket."""
        return self.pair.settle(ticket, limit_s).outcome is Outcome.QUIET


def memory_of(process):
    """A process's pool, read from outside, so that it may be stopped."""
    with Path(f"/proc/{process._process.pid}/mem").open("rb", 0) as memory:
        memory.seek(process.address)
        return memory.read(process.nbytes)


def opened():
    """A suite whose pair is open, for a fixture."""
    made = Suite()
    made.setup_method()
    yield made
    for process in made._processes:
        process.go_on()
    made.teardown_method()


def with_process(suite):
    """The suite, and a process of 16 MiB that its writer is attached to."""
    process = suite.spawn(16 * MIB)
    assert suite.settled_attach(process).outcome is Outcome.LANDED
    return suite, process
