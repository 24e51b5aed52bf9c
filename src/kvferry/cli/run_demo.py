"""The demo's conductor: a worker process for each rank and one bootstrap server. It reads only their events."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

import msgspec

from kvferry.api import KVBootstrapServer
from kvferry.cli.verdict import Outcome, judge
from kvferry.errors import ConfigError, KvferryError
from kvferry.ids import Side
from kvferry.obs import Event, read_event
from kvferry.serve.cache_file import CacheFile, Shape
from kvferry.serve.generate import WORKER_ENV
from kvferry.serve.grids import rank_names, read_grid
from kvferry.serve.rank import Go, Request, Start, cache_path

WORKER = ("-m", "kvferry.serve.worker")
PATIENCE_S = 180.0
"""The longest silence of all workers, times the ranks that compute; a long prompt on a slow machine fits."""
LEAVE_S = 10.0
"""How long a worker that is done may take to leave."""
HURRY_S = 2.0
"""The same after a failure or an interrupt, when it has been told to terminate."""


class DemoError(KvferryError):
    """A worker failed; the message is its own."""

    code = "demo"


@dataclass
class Worker:
    """A worker process and the events that it has reported."""

    side: Side
    name: str
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
        start: settings of all workers; what differs between them is filled in.
        shape: of the request's logical cache.
        request: the request; the decode workers are not told its tokens.
        show: called with every event, in the order in which they came.
    """

    def __init__(self, start: Start, shape: Shape, request: Request, show: Callable[[Event], None]) -> None:
        grids = {
            Side.PREFILL: read_grid(start.prefill, Side.PREFILL),
            Side.DECODE: read_grid(start.decode, Side.DECODE),
        }
        self._names = {side: rank_names(side, grid) for side, grid in grids.items()}
        self._patience_s = PATIENCE_S * len(self._names[Side.PREFILL])
        self._start = start
        self._shape = shape
        self._request = request
        self._show = show
        self._inbox: queue.SimpleQueue[tuple[Worker, Event | None]] = queue.SimpleQueue()
        self._workers: list[Worker] = []

    def run(self) -> Outcome:
        """Run to the verdict. Raises DemoError or ConfigError with a worker's own words."""
        folder = tempfile.TemporaryDirectory(prefix="kvferry-demo-")
        with KVBootstrapServer(port=0, secret=secrets.token_hex(16)) as server, folder:
            done = False
            try:
                outcome = self._play(server, folder)
                done = True
                return outcome
            finally:
                self._end(hurry=not done)

    def _play(self, server: KVBootstrapServer, folder: tempfile.TemporaryDirectory[str]) -> Outcome:
        for side in Side:
            CacheFile.create(cache_path(folder.name, side), self._shape)
        for side in Side:
            for rank, name in enumerate(self._names[side]):
                self._launch(side, rank, name, server, folder.name)
        self._until("ready", self._workers)
        folder.cleanup()  # all have the files open: nothing is left, whatever happens now
        begun_s = max(worker.events["ready"].at_s for worker in self._workers)
        prefill, decode = self._of(Side.PREFILL), self._of(Side.DECODE)
        _tell(decode, msgspec.structs.replace(self._request, tokens=[]))
        _tell(prefill, self._request)
        self._until("computed", prefill)
        _tell(prefill, Go())  # all at once: an engine's ranks go in step
        self._until("stored", self._workers)
        _tell(self._workers, Go())
        self._until("done", self._workers)
        grids = (self._start.prefill, self._start.decode)
        sources, targets = ([worker.events for worker in workers] for workers in (prefill, decode))
        return judge(self._start.engine, grids, sources, targets, begun_s)

    @property
    def tokens(self) -> list[int]:
        """The decode side's tokens."""
        return list(self._of(Side.DECODE)[0].events["generated"].data["tokens"])

    # -- workers

    def _of(self, side: Side) -> list[Worker]:
        return [worker for worker in self._workers if worker.side is side]

    def _launch(self, side: Side, rank: int, name: str, server: KVBootstrapServer, folder: str) -> None:
        environment = {**os.environ, **WORKER_ENV, "KVFERRY_SECRET": server.secret or ""}
        process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, *WORKER, side.value],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,  # a terminal's Ctrl-C is for this process alone, which ends its workers itself
        )  # fmt: skip
        worker = Worker(side, name, process)
        self._workers.append(worker)
        assert process.stdout is not None
        threading.Thread(target=self._read, args=(worker, process.stdout), daemon=True).start()
        worker.say(
            msgspec.structs.replace(
                self._start, name=name, rank=rank, bootstrap=f"127.0.0.1:{server.port}", folder=folder,
                seed=len(self._workers),
            )
        )  # fmt: skip

    def _read(self, worker: Worker, stream: IO[str]) -> None:
        for line in stream:
            event = read_event(line)
            if event is not None:
                self._inbox.put((worker, event))
        self._inbox.put((worker, None))

    def _until(self, kind: str, workers: Sequence[Worker]) -> None:
        """Take events until these workers have reported one of this kind."""
        while not all(kind in worker.events for worker in workers):
            try:
                worker, event = self._inbox.get(timeout=self._patience_s)
            except queue.Empty:
                raise DemoError(f"the workers said nothing for {self._patience_s:g} s") from None
            if event is None:
                code = worker.process.wait()
                raise DemoError(f"the {worker.name} worker ended early, with exit code {code}")
            worker.events[event.kind] = event
            self._show(event)
            if event.kind == "error":
                kind_of_error = ConfigError if event.data.get("input") else DemoError
                raise kind_of_error(f"{worker.name} worker: {event.data['text']}")

    def _end(self, *, hurry: bool) -> None:
        """Let all workers leave, and make sure of it, even if a second Ctrl-C comes meanwhile."""
        processes = [worker.process for worker in self._workers]
        try:
            for worker in self._workers:
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


def _tell(workers: Sequence[Worker], record: msgspec.Struct) -> None:
    for worker in workers:
        worker.say(record)


def _bury(process: subprocess.Popen[str]) -> None:
    process.kill()  # does nothing to one that has left
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
