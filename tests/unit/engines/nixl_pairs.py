"""Pairs of NIXL engines, and what is written between them."""

import contextlib

import msgspec
import numpy as np
import pytest

from kvferry.engines.nixl import NixlEngine, blob
from kvferry.engines.seam import Batch, Outcome
from kvferry.testing.suite import EngineSuite
from kvferry.testing.suite_pair import Pair, open_end

POOL = 8 << 20
TCP = {"param.engine_config": "TLS=tcp"}


def build(**options):
    made = Pair(*[open_end(NixlEngine(), number, POOL, options) for number in (1, 2)])
    made.writer.pool[:] = np.random.default_rng(3).integers(0, 256, POOL, np.uint8)
    return made


@contextlib.contextmanager
def a_pair(**options):
    made = build(**options)
    yield made
    made.close()


@contextlib.contextmanager
def a_suite(**options):
    """The suite's pair and processes, by TCP, where a stopped target holds a write up."""
    made = EngineSuite()
    made.engine_name, made.options = "nixl", {**TCP, **options}
    made.setup_method()
    yield made
    made.teardown_method()


def short(**seconds):
    return pytest.mark.parametrize("suite", [{name: str(value) for name, value in seconds.items()}], indirect=True)


def whole_pool(suite, process):
    """A batch from the writer's pool to all of the process's."""
    numbers = suite.pair.writer.address, process.address, process.nbytes
    src, dst, nbytes = (np.array([number], np.uint64) for number in numbers)
    return Batch(src, dst, nbytes, process.nbytes, 7)


def submit(suite, process):
    return suite.pair.writer.engine.submit(process.peer, whole_pool(suite, process))


def attached(suite, **more):
    process = suite.spawn(**more)
    assert suite.settled_attach(process).outcome is Outcome.LANDED
    return process


def changed(raw, **fields):
    said = msgspec.msgpack.decode(raw, type=blob.Blob)
    return msgspec.msgpack.encode(msgspec.structs.replace(said, **fields))
