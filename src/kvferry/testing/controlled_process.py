"""A Python process that a test speaks to in lines, and may stop, continue and kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence


class ControlledProcess:
    """The handle of a started process; what is said over its pipes is up to subclasses."""

    def __init__(self, module: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        """Start `python -m module arguments`, behind a prefix, with this process's search path."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(  # noqa: S603 - the command is ours
            [*prefix, sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def stop(self) -> None:
        """SIGSTOP it, and wait until it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """SIGCONT it."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL it, and wait for its end. May be called twice."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def say(self, line: bytes) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
