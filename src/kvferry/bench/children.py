"""Worker processes of a measurement: spawned, asked by lines of JSON, never waited for without a limit, never left."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.bench.failure import BenchError
from kvferry.errors import ConfigError

COMMAND = (sys.executable, "-m", "kvferry.bench.child")
START_S = 60.0
ANSWER_S = 60.0
LEAVE_S = 10.0
HURRY_S = 1.0
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Numpy's arithmetic threads would spin beside what is measured."""


class Child:
    """One process and the lines that it has said."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.lines: deque[dict[str, Any]] = deque()
        self._rest = b""
        self.process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [*command, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            env={**os.environ, **ONE_THREAD},
            start_new_session=True,  # a terminal's Ctrl-C is for this process alone, which ends its children itself
        )  # fmt: skip
        assert self.process.stdout is not None
        self.fd = self.process.stdout.fileno()

    def say(self, record: dict[str, Any]) -> None:
        """Write one line to the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # whoever awaits its answer hears why it has ended
            self.process.stdin.write(msgspec.json.encode(record) + b"\n")

    def read(self) -> None:
        """Take what it has said. Raises BenchError if it has ended."""
        data = os.read(self.fd, 1 << 20)
        if not data:
            while self.lines:
                self.take()  # it may have said why
            raise BenchError(f"the {self.name} process ended early, {self.ending()}")
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines.extend(msgspec.json.decode(line) for line in lines)

    def take(self) -> Any:
        """Its oldest answer. Raises BenchError or ConfigError in its words."""
        said = self.lines.popleft()
        if "error" in said:
            raise (ConfigError if said.get("input") else BenchError)(f"{self.name} process: {said['error']}")
        return said["result"]

    def ending(self) -> str:
        """How it has ended, in words."""
        try:
            code = self.process.wait(HURRY_S)
        except subprocess.TimeoutExpired:
            return "it closed its output and goes on running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class Crew:
    """The processes of one measurement; a context manager that leaves none behind.

    Args:
        command: what starts a process; its last argument will be this process's id.
    """

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._command = tuple(command) or COMMAND
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(self._children, hurry=kind is not None)
        self._selector.close()

    def start(self, name: str, role: str, setup: msgspec.Struct) -> Child:
        """Start a process.

        Args:
            name: what it is called in messages.
            role: "module:Class" of what it plays; the class is made of `setup`.
            setup: its settings.
        """
        child = Child(name, self._command)
        self._children.append(child)
        self._selector.register(child.fd, selectors.EVENT_READ, child)
        child.say({"role": role, "setup": msgspec.to_builtins(setup)})
        return child

    def ready(self, child: Child) -> Any:
        """Wait until a process has started; returns what it says then. Raises as `answer`."""
        return self.answer(child, "start", START_S)

    def ask(self, child: Child, what: str, limit_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Have a process do something, and return the result. Raises as `answer`."""
        self.begin(child, what, **arguments)
        return self.answer(child, what, limit_s)

    def begin(self, child: Child, what: str, **arguments: Any) -> None:
        """Have a process begin with something; `answer` collects the result."""
        child.say({"do": what, "with": arguments})

    def answer(self, child: Child, what: str, limit_s: float = ANSWER_S) -> Any:
        """Wait for a process's next answer.

        Raises:
            BenchError: any of the processes has ended or reports a failure, or there is no answer in time.
            ConfigError: what the process was told can't be done; in its words.
        """
        deadline_s = time.monotonic() + limit_s
        while not child.lines:
            left_s = deadline_s - time.monotonic()
            ready = self._selector.select(left_s) if left_s > 0 else []
            if not ready and left_s <= 0:
                raise BenchError(
                    f"the {child.name} process did not answer {what!r} within {limit_s:g} s",
                    hint="it hangs, or the machine is overloaded",
                )
            for key, _ in ready:
                key.data.read()
        return child.take()

    def end(self, children: Sequence[Child], *, hurry: bool = False) -> None:
        """Let processes leave, and make sure of it."""
        leaving = [child for child in children if child in self._children]
        try:
            for child in leaving:
                self._dismiss(child, hurry=hurry)
            deadline_s = time.monotonic() + (HURRY_S if hurry else LEAVE_S)
            for child in leaving:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline_s - time.monotonic()))
        finally:
            for child in leaving:
                self._bury(child)

    def _dismiss(self, child: Child, *, hurry: bool) -> None:
        assert child.process.stdin is not None
        if hurry:
            child.process.terminate()
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.close()  # the end of its input tells it to leave

    def _bury(self, child: Child) -> None:
        child.process.kill()  # does nothing to one that has left
        child.process.wait()
        self._selector.unregister(child.fd)
        assert child.process.stdout is not None
        child.process.stdout.close()
        self._children.remove(child)
