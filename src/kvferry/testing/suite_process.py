"""A second process with an engine of its own, told what to do by JSON lines; the suite kills and stops it.

Run as `python -m kvferry.testing.suite_process ENGINE OPTIONS_JSON INCARNATION POOL_BYTES MEMORY`, where ENGINE is a
name, or "name=module:Class" for one that was registered by the first process.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from kvferry.answers import take_stdio
from kvferry.engines import find
from kvferry.engines.grants import GrantTable
from kvferry.engines.seam import Batch, Done, EngineConfig, Ticket
from kvferry.ids import PeerId
from kvferry.testing.controlled_process import ControlledProcess
from kvferry.testing.settings import PATIENCE
from kvferry.testing.suite_memory import PLAIN, address_of, new_pool, region_of

_IDLE_POLL_S = 0.002 * PATIENCE
_ANSWER_S = 60.0 * PATIENCE
_MEANWHILE_S = 0.002 * PATIENCE
_NOWHERE = 1 << 16
"""An address below everything that the kernel maps for a program."""

Command = dict[str, Any]

_answers: BinaryIO


class EngineProcess(ControlledProcess):
    """The handle of a started process.

    Attributes:
        peer: its identity.
        blob: what its engine describes.
        address: where its pool of nbytes bytes lies, in its own address space.
        nowhere: an address of its own at which no memory is mapped.
        meanwhile: called again and again while an answer is waited for, for engines whose target has to poll.
    """

    nowhere = _NOWHERE

    def __init__(
        self,
        engine: str,
        options: dict[str, str],
        incarnation: int,
        nbytes: int,
        prefix: tuple[str, ...] = (),
        memory: str = PLAIN,
    ) -> None:
        super().__init__(__name__, engine, json.dumps(options), str(incarnation), str(nbytes), memory, prefix=prefix)
        self._buffered = b""
        self.meanwhile: Callable[[], object] | None = None
        self.peer = PeerId(incarnation)
        self.nbytes = nbytes
        hello = self._read()
        self.blob = bytes.fromhex(hello["blob"])
        self.address = int(hello["address"])

    def do(self, what: str, **arguments: object) -> Command:
        """Send one command and wait for its answer, at most 60 s, or as many more as tests are patient."""
        self.say(json.dumps({"do": what, **arguments}).encode())
        return self._read()

    def attach(self, peer: PeerId, blob: bytes) -> Command:
        """Let it attach to a peer; the answer has outcome and cause."""
        return self.do("attach", peer=[peer.incarnation, peer.epoch], blob=blob.hex())

    def flood(self, peer: PeerId, claim: int, address: int) -> None:
        """Let it write its pool to an address again and again, each time with other bytes."""
        self.do("flood", peer=[peer.incarnation, peer.epoch], claim=claim, dst=address)

    def _read(self) -> Command:
        until = time.monotonic() + _ANSWER_S
        while b"\n" not in self._buffered:
            if time.monotonic() > until:
                raise TimeoutError(f"the engine process said nothing for {_ANSWER_S:.0f} s")
            self._read_some()
        line, _, self._buffered = self._buffered.partition(b"\n")
        answer: Command = json.loads(line)
        return answer

    def _read_some(self) -> None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        if self.meanwhile is not None:
            self.meanwhile()
        if select.select([fd], [], [], _ANSWER_S if self.meanwhile is None else _MEANWHILE_S)[0]:
            raw = os.read(fd, 1 << 20)
            if not raw:
                raise EOFError(f"the engine process ended with {self._process.wait()}")
            self._buffered += raw


class _Worker:
    """The process's own side: one engine, one pool, one command at a time."""

    def __init__(self, engine: str, options: dict[str, str], me: PeerId, nbytes: int, memory: str) -> None:
        self.pool = new_pool(memory, nbytes)
        self.pool[:] = 0xEE
        self.grants = GrantTable()
        self.engine = find.load(_registered(engine))
        self.engine.open(EngineConfig(me, self.grants, options=options))
        self.engine.register([region_of(self.pool)])
        self._flooding: Command | None = None
        self._rounds = 0

    def run(self) -> None:
        """Answer commands until the other end closes."""
        _say({"blob": self.engine.describe().hex(), "address": address_of(self.pool)})
        while True:
            if select.select([sys.stdin], [], [], 0)[0]:
                line = sys.stdin.readline()
                if not line:
                    break
                command = json.loads(line)
                _say(getattr(self, f"on_{command['do']}")(command))
            elif self._flooding is not None:
                self._flood_once(self._flooding)
            else:
                self.engine.poll(_IDLE_POLL_S)
        self.engine.close()

    def on_attach(self, command: Command) -> Command:
        return self._settled(self.engine.attach(PeerId(*command["peer"]), bytes.fromhex(command["blob"])))

    def on_grant(self, command: Command) -> Command:
        start = address_of(self.pool)
        self.grants.add(PeerId(*command["peer"]), command["claim"], [start], [start + self.pool.nbytes])
        return {}

    def on_write(self, command: Command) -> Command:
        self.pool[:] = command["fill"]
        return self._settled(self._submit(command))

    def on_flood(self, command: Command) -> Command:
        self._flooding = command
        return {}

    def on_detach(self, command: Command) -> Command:
        self._flooding = None
        self.engine.detach(PeerId(*command["peer"]))
        return {}

    def on_info(self, _command: Command) -> Command:
        info = getattr(self.engine, "info", None)
        return {"info": info() if info is not None else {}, "rounds": self._rounds}

    def on_bytes(self, command: Command) -> Command:
        return {"bytes": self.pool[command["offset"] : command["offset"] + command["nbytes"]].tobytes().hex()}

    def _flood_once(self, command: Command) -> None:
        self._rounds += 1
        self.pool[:] = self._rounds % 251
        self._settle(self._submit(command))

    def _submit(self, command: Command) -> Ticket:
        nbytes = np.array([self.pool.nbytes], np.uint64)
        src = np.array([address_of(self.pool)], np.uint64)
        dst = np.array([command["dst"]], np.uint64)
        return self.engine.submit(PeerId(*command["peer"]), Batch(src, dst, nbytes, self.pool.nbytes, command["claim"]))

    def _settle(self, ticket: Ticket) -> Done:
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until:
            for done in self.engine.poll(0.1):
                if done.ticket == ticket:
                    return done
        raise TimeoutError(f"ticket {ticket} has not ended within {_ANSWER_S:.0f} s")

    def _settled(self, ticket: Ticket) -> Command:
        done = self._settle(ticket)
        return {"outcome": done.outcome.value, "cause": done.cause, "native": done.native}


def _registered(engine: str) -> str:
    name, _, target = engine.partition("=")
    if target:
        find.register(name, target)
    return name


def _say(answer: Command) -> None:
    _answers.write(json.dumps(answer).encode() + b"\n")
    _answers.flush()


def _main() -> None:
    global _answers  # noqa: PLW0603 - a process has one
    engine, options, incarnation, nbytes, memory = sys.argv[1:]
    _answers = take_stdio()
    _Worker(engine, json.loads(options), PeerId(int(incarnation)), int(nbytes), memory).run()


if __name__ == "__main__":
    _main()
