"""A rank of a test cluster in a process of its own, told what to do by JSON lines; a test may stop and kill it.

Run as `python -m kvferry.testing.cluster_process`; the first line says which rank it is.
"""

from __future__ import annotations

import functools
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec

from kvferry.answers import take_stdio
from kvferry.engines import find
from kvferry.layout import Layout
from kvferry.testing.cluster_rank import ClusterRank, HandOff
from kvferry.testing.controlled_process import ControlledProcess
from kvferry.testing.settings import PATIENCE
from kvferry.testing.suite_memory import PLAIN

ANSWER_S = 60.0 * PATIENCE
CALLS = {
    "begin", "send", "poll", "wait", "failure", "abort", "landed_bytes", "wanted_bytes", "clear", "differences",
    "aux_row", "leftovers", "caps",
}  # fmt: skip
"""What ClusterRank has and this passes on."""


class Start(msgspec.Struct, frozen=True):
    """What a process is started with: the arguments of ClusterRank, and engines that the parent has registered."""

    side: str
    layout: Layout
    group: tuple[Layout, ...]
    others: tuple[Layout, ...]
    engine: str
    settings: dict[str, Any]
    memory: str
    registered: dict[str, str]


class RankProcess(ControlledProcess):
    """The handle of a rank's process: the calls of ClusterRank, and `stop`, `go_on`, `kill`.

    Attributes:
        endpoint: its control plane, "tcp://host:port".
        layout: what it holds, not bound.
    """

    def __init__(
        self, side: str, layout: Layout, group: Sequence[Layout], others: Sequence[Layout], engine: str,
        settings: dict[str, Any], memory: str = PLAIN,
    ) -> None:  # fmt: skip
        super().__init__(__name__)
        self.layout = layout
        registered = {name: info.target for name, info in find.known().items() if info.origin == "registered"}
        start = Start(side, layout, tuple(group), tuple(others), engine, settings, memory, registered)
        try:
            self.endpoint: str = self._ask(msgspec.json.encode(start))
        except BaseException:
            self.kill()
            raise

    def __getattr__(self, call: str) -> Callable[..., Any]:
        """The calls of ClusterRank, made there; they raise here what they raise there."""
        if call not in CALLS:
            raise AttributeError(call)
        return lambda *args, **named: self._ask(msgspec.json.encode([call, args, named]))

    def health(self) -> str:
        """What is wrong with its threads; "" if nothing is; a process that has ended says so."""
        if (code := self._process.poll()) is not None:
            return f"the process has ended with {code}"
        return str(self._ask(msgspec.json.encode(["health", (), {}])))

    def close(self) -> None:
        """Let it shut its manager down and end; kill it if it does not."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.kill()

    def _ask(self, line: bytes) -> Any:
        assert self._process.stdout is not None
        self.say(line)
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"rank process {self.pid} said nothing for {ANSWER_S:.0f} s")
        answer = self._process.stdout.readline()
        if not answer:
            raise EOFError(f"rank process {self.pid} ended with {self._process.wait()}")
        value, error = msgspec.json.decode(answer)
        if error:
            raise RuntimeError(f"rank process {self.pid}: {error}")
        return value


def _answer(answers: BinaryIO, action: Callable[[], Any]) -> None:
    value, error = None, ""
    try:
        value = action()
    except Exception as caught:  # noqa: BLE001 - it is raised again at the other end
        error = f"{type(caught).__name__}: {caught}"
    answers.write(msgspec.json.encode([value, error]) + b"\n")
    answers.flush()


def _main() -> None:
    answers = take_stdio()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    for name, target in start.registered.items():
        find.register(name, target)
    ranks: list[ClusterRank] = []

    def begin() -> str:
        made = ClusterRank(
            start.side, start.layout, start.group, start.others, start.engine, start.settings, start.memory
        )
        ranks.append(made)
        return made.endpoint

    _answer(answers, begin)
    for line in sys.stdin.buffer if ranks else ():
        call, args, named = msgspec.json.decode(line)
        if call == "begin":
            args[0] = msgspec.convert(args[0], HandOff)
        _answer(answers, functools.partial(getattr(ranks[0], call), *args, **named))
    for rank in ranks:
        rank.close()


if __name__ == "__main__":
    _main()
