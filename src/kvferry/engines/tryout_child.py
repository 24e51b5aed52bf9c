"""A process of an engine's try-out: `python -m kvferry.engines.tryout_child ENGINE ROLE [NBYTES]`, lines of JSON.

"target" says how it is reached and where its memory of NBYTES is, and for each line that comes what lies there now;
or why it can't be one. "writer" is told an address, a pattern and options by each line, and answers why it could not
write it, or "". Both leave when their input ends.
"""

from __future__ import annotations

import json
import select
import sys
import time
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kvferry.answers import take_stdio
from kvferry.engines import find
from kvferry.engines.grants import GrantTable
from kvferry.engines.seam import Batch, Done, Engine, EngineConfig, Outcome, Region, Ticket
from kvferry.errors import KvferryError
from kvferry.ids import PeerId
from kvferry.pool import allocate_pool

Bytes = npt.NDArray[np.uint8]

_TARGET, _CLAIM = PeerId(1), 1
_WRITERS = range(2, 10)
"""What writers may be called; each attempt has a name of its own."""
_SETTLE_S = 15.0


def target(engine_name: str, nbytes: int, answers: BinaryIO) -> None:
    """Own the memory, and poll, which peers of some engines need."""
    memory, why_no_memfd = _memory(nbytes)
    grants = GrantTable()
    for number in _WRITERS:
        grants.add(PeerId(number), _CLAIM, [memory.ctypes.data], [memory.ctypes.data + nbytes])
    try:
        engine = _opened(engine_name, _TARGET, memory, grants)
    except KvferryError as error:
        _say(answers, {"why": str(error)})
        return
    info: dict[str, Any] = getattr(engine, "info", dict)()
    facts = {"why": "", "why_no_memfd": why_no_memfd, "info": info, "blob": engine.describe().hex()}
    _say(answers, {**facts, "address": int(memory.ctypes.data)})
    while True:
        engine.poll(0.001)
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                break
            _say(answers, {"bytes": memory.tobytes().hex()})
    engine.close()


def writer(engine_name: str, answers: BinaryIO) -> None:
    """Write what each line says."""
    for number, line in zip(_WRITERS, sys.stdin, strict=False):
        try:
            why = _why_not(engine_name, PeerId(number), json.loads(line))
        except KvferryError as error:
            why = str(error)
        _say(answers, {"why": why})


def _memory(nbytes: int) -> tuple[Bytes, str]:
    try:
        return allocate_pool(nbytes, kind="memfd").array, ""
    except KvferryError as error:
        return np.zeros(nbytes, np.uint8), str(error)


def _opened(name: str, me: PeerId, memory: Bytes, grants: GrantTable, options: dict[str, str] | None = None) -> Engine:
    engine = find.load(name)
    engine.open(EngineConfig(me, grants, options=options or {}))
    engine.register([Region(int(memory.ctypes.data), memory.nbytes)])
    return engine


def _why_not(name: str, me: PeerId, task: dict[str, Any]) -> str:
    memory = np.frombuffer(bytes.fromhex(task["pattern"]), np.uint8)
    engine = _opened(name, me, memory, GrantTable(), task["options"])
    try:
        attached = _settled(engine, engine.attach(_TARGET, bytes.fromhex(task["blob"])))
        if attached.outcome is not Outcome.LANDED:
            return attached.cause
        numbers = memory.ctypes.data, task["address"], memory.nbytes
        src, dst, nbytes = (np.array([number], np.uint64) for number in numbers)
        return _settled(engine, engine.submit(_TARGET, Batch(src, dst, nbytes, memory.nbytes, _CLAIM))).cause
    finally:
        engine.close()


def _settled(engine: Engine, ticket: Ticket) -> Done:
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        for done in engine.poll(0.05):
            if done.ticket == ticket:
                return done
    return Done(ticket, Outcome.FAILED_UNKNOWN, f"no outcome within {_SETTLE_S:.0f} s")


def _say(answers: BinaryIO, record: dict[str, Any]) -> None:
    answers.write(json.dumps(record).encode() + b"\n")
    answers.flush()


def _main(engine_name: str, role: str, nbytes: str = "0") -> None:
    answers = take_stdio()
    if role == "target":
        target(engine_name, int(nbytes), answers)
    else:
        writer(engine_name, answers)


if __name__ == "__main__":
    _main(*sys.argv[1:])
