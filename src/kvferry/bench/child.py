"""A worker process of a measurement: `python -m kvferry.bench.child PARENT_PID`, told what to do by lines of JSON.

First line {"role": "module:Class", "setup": {...}}; then {"do": NAME, "with": {...}}, which calls the method NAME of
the class. Each line is answered with {"result": ...} or {"error": text, "input": whether the caller's input is wrong}.
The process leaves when its input ends, and is killed when its parent dies.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any, ClassVar, Protocol

import msgspec

from kvferry.answers import take_stdio
from kvferry.errors import ConfigError, KvferryError

_PR_SET_PDEATHSIG = 1
_answers: IO[bytes]


class Role(Protocol):
    """What a process plays: made of a setup of the type `takes`; its other methods are what it can be asked."""

    takes: ClassVar[type[msgspec.Struct]]

    def hello(self) -> Any:
        """What it says when it is ready."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


def note(result: Any = None) -> None:
    """Answer from inside a call, before its own answer: the next step is on its way."""
    _write({"result": result})


def main(arguments: list[str]) -> int:
    """Run until the input ends."""
    global _answers  # noqa: PLW0603 - a process has one
    die_with(int(arguments[0]))
    raise_file_limit()
    _answers = take_stdio()
    logging.basicConfig(level=logging.WARNING, format="kvferry: %(message)s")
    role: Role | None = None
    try:
        start = msgspec.json.decode(sys.stdin.buffer.readline())
        role = _attempt(lambda: _make(start["role"], start["setup"]))
        if role is None or not _answer(role.hello, {}):
            return 2
        for line in sys.stdin.buffer:
            command = msgspec.json.decode(line)
            _answer(getattr(role, command["do"]), command["with"])
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), _answers.fileno())
    finally:
        if role is not None:
            role.close()
    return 0


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone: nothing of a measurement outlives it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _make(target: str, setup: dict[str, Any]) -> Role:
    module, _, name = target.partition(":")
    kind = getattr(importlib.import_module(module), name)
    role: Role = kind(msgspec.convert(setup, kind.takes))
    return role


def _answer(call: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    found = _attempt(lambda: {"result": call(**arguments)})
    if found is not None:
        _write(found)
    return found is not None


def _attempt(call: Callable[[], Any]) -> Any:
    """Call, or report the error and return None."""
    try:
        return call()
    except KvferryError as error:
        _write({"error": str(error), "input": isinstance(error, ConfigError)})
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the parent has to hear of it, whatever it was
        traceback.print_exc()
        _write({"error": f"{type(error).__name__}: {error}", "input": False})
    return None


def _write(record: dict[str, Any]) -> None:
    _answers.write(msgspec.json.encode(record) + b"\n")
    _answers.flush()


if __name__ == "__main__":
    from kvferry.bench.child import main as imported

    # roles import this module by its name: they must find the same channel for answers
    sys.exit(imported(sys.argv[1:]))
