"""The demo's conductor: two worker processes, one bootstrap server, and a verdict. It reads only their events."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from kvferry.api import KVBootstrapServer
from kvferry.errors import ConfigError, KvferryError
from kvferry.obs import Event, read_event
from kvferry.serve.generate import WORKER_ENV
from kvferry.serve.worker import Request, Start

SIDES = ("prefill", "decode")
PATIENCE_S = 180.0
"""The longest silence of both workers; loading and prefill of a long prompt on a slow machine fit."""
LEAVE_S = 10.0
"""How long a worker that is done may take to leave."""
HURRY_S = 2.0
"""The same after a failure or an interrupt, when it has been told to terminate."""


class DemoError(KvferryError):
    """A worker failed; the message is its own."""

    code = "demo"


@dataclass
class Outcome:
    """What the demo found; the fields of `--json`."""

    engine: str
    tokens_equal: bool
    logits_equal: bool
    kv_bytes_equal: bool
    kv_bytes: int
    transfer_s: float
    gb_per_s: float
    memcpy_ratio: float
    ttft_s: float
    text: str

    @property
    def all_equal(self) -> bool:
        """The decode side held the same bytes and computed the same bits."""
        return self.tokens_equal and self.logits_equal and self.kv_bytes_equal


@dataclass
class Worker:
    """A worker process and the events that it has reported."""

    side: str
    process: subprocess.Popen[str]
    events: dict[str, Event] = field(default_factory=dict)

    def say(self, record: msgspec.Struct | None) -> None:
        """Write one line to the worker."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((msgspec.json.encode(record).decode() if record is not None else "") + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # its error event, or its exit code, says why


class Demo:
    """One run.

    Args:
        start: settings of both workers; the bootstrap address is filled in.
        request: the request; the decode worker is not told its tokens.
        show: called with every event, in the order in which they came.
    """

    def __init__(self, start: Start, request: Request, show: Callable[[Event], None]) -> None:
        self._start = start
        self._request = request
        self._show = show
        self._inbox: queue.SimpleQueue[tuple[str, Event | None]] = queue.SimpleQueue()
        self._workers: dict[str, Worker] = {}

    def run(self) -> Outcome:
        """Run to the verdict. Raises DemoError or ConfigError with a worker's own words."""
        with KVBootstrapServer(port=0, secret=secrets.token_hex(16)) as server:
            done = False
            try:
                outcome = self._play(server)
                done = True
                return outcome
            finally:
                self._end(hurry=not done)

    def _play(self, server: KVBootstrapServer) -> Outcome:
        for number, side in enumerate(SIDES):
            self._launch(side, server, seed=number + 1)
        self._until("ready")
        begun_s = max(self._workers[side].events["ready"].at_s for side in SIDES)
        self._workers["decode"].say(msgspec.structs.replace(self._request, tokens=[]))
        self._workers["prefill"].say(self._request)
        self._until("generated")
        return self._verdict(begun_s)

    # -- workers

    def _launch(self, side: str, server: KVBootstrapServer, seed: int) -> None:
        environment = {**os.environ, **WORKER_ENV, "KVFERRY_SECRET": server.secret or ""}
        process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", "kvferry.serve.worker", side],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,  # a terminal's Ctrl-C is for this process alone, which ends its workers itself
        )  # fmt: skip
        worker = self._workers[side] = Worker(side, process)
        assert process.stdout is not None
        threading.Thread(target=self._read, args=(side, process.stdout), daemon=True).start()
        worker.say(msgspec.structs.replace(self._start, bootstrap=f"127.0.0.1:{server.port}", seed=seed))

    def _read(self, side: str, stream: IO[str]) -> None:
        for line in stream:
            event = read_event(line)
            if event is not None:
                self._inbox.put((side, event))
        self._inbox.put((side, None))

    def _until(self, kind: str) -> None:
        """Take events until both workers have reported one of this kind."""
        while not all(kind in worker.events for worker in self._workers.values()):
            try:
                side, event = self._inbox.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise DemoError(f"the workers said nothing for {PATIENCE_S:g} s") from None
            if event is None:
                code = self._workers[side].process.wait()
                raise DemoError(f"the {side} worker ended early, with exit code {code}")
            self._workers[side].events[event.kind] = event
            self._show(event)
            if event.kind == "error":
                kind_of_error = ConfigError if event.data.get("input") else DemoError
                raise kind_of_error(f"{side} worker: {event.data['text']}")

    def _end(self, *, hurry: bool) -> None:
        """Let both workers leave, and make sure of it, even if a second Ctrl-C comes meanwhile."""
        processes = [worker.process for worker in self._workers.values()]
        try:
            for worker in self._workers.values():
                if hurry:
                    worker.process.terminate()
                else:
                    worker.say(None)
            deadline_s = time.monotonic() + (HURRY_S if hurry else LEAVE_S)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline_s - time.monotonic()))
        finally:
            for process in processes:
                _bury(process)

    # -- the verdict

    def _verdict(self, begun_s: float) -> Outcome:
        prefill, decode = (self._workers[side].events for side in SIDES)
        handed: dict[str, Any] = prefill["handed over"].data
        transfer_s = max(1e-9, decode["received"].at_s - handed["sent_s"])
        kv_bytes = decode["received"].data["kv_bytes"]
        return Outcome(
            engine=self._start.engine,
            tokens_equal=prefill["generated"].data["tokens"] == decode["generated"].data["tokens"],
            logits_equal=prefill["generated"].data["logits"] == decode["generated"].data["logits"],
            kv_bytes_equal=prefill["digests"].data["digests"] == decode["digests"].data["digests"],
            kv_bytes=kv_bytes, transfer_s=transfer_s, gb_per_s=kv_bytes / transfer_s / 1e9,
            memcpy_ratio=handed["memcpy_s"] / transfer_s, ttft_s=decode["received"].at_s - begun_s, text="",
        )  # fmt: skip

    @property
    def tokens(self) -> list[int]:
        """The decode side's tokens."""
        return list(self._workers["decode"].events["generated"].data["tokens"])


def _bury(process: subprocess.Popen[str]) -> None:
    process.kill()  # does nothing to one that has left
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
