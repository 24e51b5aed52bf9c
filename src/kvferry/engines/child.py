"""A process that an engine's try-out starts and speaks with in lines of JSON, so that a crash stays in there."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import IO, Any

ANSWER_S = 20.0


class Child:
    """A process that runs a module; neither an ancestor nor a descendant of another one, as workers are."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] = MappingProxyType({}),
        errors: IO[bytes] | None = None,
    ) -> None:
        """Start `python -m module arguments`.

        Args:
            module: our own.
            arguments: what it is told at the start.
            environment: variables besides those of this process.
            errors: where its standard error goes; None: nowhere.
        """
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if errors is None else errors,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )  # fmt: skip

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def ask(self, record: dict[str, Any]) -> dict[str, Any]:
        """Say one line and hear one; raises OSError, and TimeoutError, which is one."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(record).encode() + b"\n")
        self._process.stdin.flush()
        return self.hear()

    def hear(self, limit_s: float = 0.0) -> dict[str, Any]:
        """The next line, waiting for limit_s seconds (0: ANSWER_S); raises OSError."""
        seconds = limit_s or ANSWER_S
        assert self._process.stdout is not None
        # each line is asked for before the next is said, so that none waits in the buffer when this selects
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"a child process said nothing for {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(f"a child process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
