"""A process of the try-out: `python -m kvferry.engines.local.tryout_child ROLE`, spoken to in lines of JSON.

"target" says where its memory is, and for each line that comes what lies there now. "writer" is told a mechanism, a
target and a pattern, and answers why it could not write it, or "". Both leave when their input ends.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.engines.grants import GrantTable
from kvferry.engines.local.engine import LocalEngine
from kvferry.engines.seam import Batch, Done, EngineConfig, Outcome, Region, Ticket
from kvferry.errors import KvferryError
from kvferry.ids import PeerId
from kvferry.pool import allocate_pool

MECHANISMS = ("shm", "cma", "tcp")
PATTERN_BYTES = 4096
_TARGET, _CLAIM = PeerId(1), 1
_WRITERS = {mechanism: PeerId(number) for number, mechanism in enumerate(MECHANISMS, 2)}
_SETTLE_S = 15.0


def target() -> None:
    """Own the memory."""
    memory, why = _memory()
    address = int(memory.ctypes.data)
    grants = GrantTable()
    for peer in _WRITERS.values():
        grants.add(peer, _CLAIM, [address], [address + PATTERN_BYTES])
    engine = LocalEngine()
    engine.open(EngineConfig(_TARGET, grants))
    engine.register([Region(address, PATTERN_BYTES)])
    _say({"blob": engine.describe().hex(), "address": address, "why_no_memfd": why})
    for _ in sys.stdin:
        _say({"bytes": memory.tobytes().hex()})
    engine.close()


def writer() -> None:
    """Write what each line says."""
    for line in sys.stdin:
        task = json.loads(line)
        try:
            why = _why_not(task)
        except KvferryError as error:
            why = str(error)
        _say({"why": why})


def _memory() -> tuple[npt.NDArray[np.uint8], str]:
    try:
        return allocate_pool(PATTERN_BYTES, kind="memfd").array, ""
    except KvferryError as error:
        return np.zeros(PATTERN_BYTES, np.uint8), str(error)


def _why_not(task: dict[str, Any]) -> str:
    mechanism = task["mechanism"]
    pattern = np.frombuffer(bytes.fromhex(task["pattern"]), np.uint8)
    engine = LocalEngine()
    engine.open(EngineConfig(_WRITERS[mechanism], GrantTable(), options={"mechanism": mechanism}))
    try:
        engine.register([Region(pattern.ctypes.data, PATTERN_BYTES)])
        attached = _settled(engine, engine.attach(_TARGET, bytes.fromhex(task["blob"])))
        if attached.outcome is not Outcome.LANDED:
            return attached.cause.removeprefix(f"can't attach: {mechanism}: ")
        src, dst, nbytes = (
            np.array([number], np.uint64) for number in (pattern.ctypes.data, task["address"], PATTERN_BYTES)
        )
        return _settled(engine, engine.submit(_TARGET, Batch(src, dst, nbytes, PATTERN_BYTES, _CLAIM))).cause
    finally:
        engine.close()


def _settled(engine: LocalEngine, ticket: Ticket) -> Done:
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        for done in engine.poll(0.05):
            if done.ticket == ticket:
                return done
    return Done(ticket, Outcome.FAILED_UNKNOWN, f"no outcome within {_SETTLE_S:.0f} s")


def _say(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"target": target, "writer": writer}[sys.argv[1]]()
