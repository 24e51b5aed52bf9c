"""One process of the try-out: a target that says what it has received, or a writer.

Run as `python -m kvferry.engines.mooncake.tryout_child [BLOB ADDRESS PATTERN]`; with arguments it is the writer.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from kvferry.engines.grants import GrantTable
from kvferry.engines.mooncake.engine import MooncakeEngine
from kvferry.engines.seam import Batch, Done, EngineConfig, Outcome, Region, Ticket
from kvferry.errors import KvferryError
from kvferry.ids import PeerId

PATTERN_BYTES = 4096
_TARGET, _WRITER = PeerId(1), PeerId(2)


def _opened(me: PeerId, pool: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> MooncakeEngine:
    engine = MooncakeEngine()
    engine.open(EngineConfig(me, GrantTable()))
    engine.register([Region(int(pool.ctypes.data), pool.nbytes)])
    return engine


def _target() -> None:
    pool = np.zeros(PATTERN_BYTES, np.uint8)
    engine = _opened(_TARGET, pool)
    _say({"blob": engine.describe().hex(), "address": int(pool.ctypes.data)})
    sys.stdin.readline()
    _say({"bytes": pool.tobytes().hex()})
    engine.close()


def _write(blob: bytes, address: int, pattern: bytes) -> str:
    """Write a pattern to the target; returns why it can't, or ""."""
    pool = np.frombuffer(bytearray(pattern), np.uint8)
    engine = _opened(_WRITER, pool)
    rows = np.array([[pool.ctypes.data], [address], [len(pattern)]], np.uint64)
    attached = _ended(engine, engine.attach(_TARGET, blob))
    done = attached
    if attached.outcome is Outcome.LANDED:
        done = _ended(engine, engine.submit(_TARGET, Batch(rows[0], rows[1], rows[2], len(pattern))))
    engine.close()
    return done.cause if done.outcome is not Outcome.LANDED else ""


def _ended(engine: MooncakeEngine, ticket: Ticket) -> Done:
    while True:
        for done in engine.poll(1.0):
            if done.ticket == ticket:
                return done


def _say(record: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _main(arguments: list[str]) -> None:
    if not arguments:
        _target()
        return
    blob, address, pattern = arguments
    try:
        why = _write(bytes.fromhex(blob), int(address), bytes.fromhex(pattern))
    except KvferryError as error:
        why = str(error)
    _say({"why": why})


if __name__ == "__main__":
    _main(sys.argv[1:])
