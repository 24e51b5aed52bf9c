"""A process of the try-out: `python -m kvferry.engines.nixl.tryout_child ROLE`, spoken to in lines of JSON.

"target" says how it is reached and where its memory is, and for each line that comes what lies there now. "writer" is
told a target and a pattern, and answers why it could not write it, or "". Both leave when their input ends.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from kvferry.engines.grants import GrantTable
from kvferry.engines.nixl.engine import NixlEngine
from kvferry.engines.seam import Batch, Done, EngineConfig, Outcome, Region, Ticket
from kvferry.errors import KvferryError
from kvferry.ids import PeerId

PATTERN_BYTES = 65536
_TARGET, _WRITER = PeerId(1), PeerId(2)
_SETTLE_S = 15.0


def target(answers: TextIO) -> None:
    """Own the memory, and poll, which peers need."""
    memory = np.zeros(PATTERN_BYTES, np.uint8)
    try:
        engine = _opened(_TARGET, memory)
    except KvferryError as error:
        _say(answers, {"why": str(error)})
        return
    info = engine.info()
    facts = {"why": "", "library": info["library"], "plugins": info["plugins"]}
    _say(answers, {**facts, "blob": engine.describe().hex(), "address": memory.ctypes.data})
    while True:
        engine.poll(0.001)
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                break
            _say(answers, {"bytes": memory.tobytes().hex()})
    engine.close()


def writer(answers: TextIO) -> None:
    """Write what a line says."""
    task = json.loads(sys.stdin.readline())
    memory = np.frombuffer(bytes.fromhex(task["pattern"]), np.uint8)
    try:
        engine = _opened(_WRITER, memory)
    except KvferryError as error:
        _say(answers, {"why": str(error)})
        return
    _say(answers, {"why": _why_not(engine, memory.ctypes.data, task)})
    engine.close()


def _opened(me: PeerId, memory: npt.NDArray[np.uint8]) -> NixlEngine:
    engine = NixlEngine()
    engine.open(EngineConfig(me, GrantTable()))
    engine.register([Region(memory.ctypes.data, memory.nbytes)])
    return engine


def _why_not(engine: NixlEngine, address: int, task: dict[str, Any]) -> str:
    attached = _settled(engine, engine.attach(_TARGET, bytes.fromhex(task["blob"])))
    if attached.outcome is not Outcome.LANDED:
        return attached.cause
    src, dst, nbytes = (np.array([number], np.uint64) for number in (address, task["address"], PATTERN_BYTES))
    return _settled(engine, engine.submit(_TARGET, Batch(src, dst, nbytes, PATTERN_BYTES, 1))).cause


def _settled(engine: NixlEngine, ticket: Ticket) -> Done:
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        for done in engine.poll(0.05):
            if done.ticket == ticket:
                return done
    return Done(ticket, Outcome.FAILED_UNKNOWN, f"no outcome within {_SETTLE_S:.0f} s")


def _say(answers: TextIO, record: dict[str, Any]) -> None:
    answers.write(json.dumps(record) + "\n")
    answers.flush()


def _main() -> None:
    # native libraries print to descriptor 1, which answers must not be mixed with
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        {"target": target, "writer": writer}[sys.argv[1]](answers)


if __name__ == "__main__":
    _main()
