"""What the engines' try-outs share: one process that writes into the memory of another one, and what is found there."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import IO, Any

from kvferry.engines.child import Child
from kvferry.engines.findings import Finding

_CHILD = "kvferry.engines.tryout_child"
_NOTHING: Mapping[str, str] = MappingProxyType({})

FAILURES = (OSError, ValueError)
"""What a try-out meets if a child does not start, ends, hangs, or says something else."""


class Siblings:
    """A target and a writer with an engine each.

    Attributes:
        hello: what the target said: "why" it can't be one, or "", and then "info", "why_no_memfd".
    """

    def __init__(self, target: Child, writer: Child, nbytes: int) -> None:
        """Hear the target. Raises what FAILURES lists."""
        self._target, self._writer, self._nbytes = target, writer, nbytes
        self.hello: dict[str, Any] = target.hear()

    def write(self, options: Mapping[str, str] = _NOTHING) -> str:
        """Have the writer, with these options, fill the target's memory; why it did not, or "". Raises FAILURES."""
        pattern = secrets.token_hex(self._nbytes)
        where = {"blob": self.hello["blob"], "address": self.hello["address"]}
        why: str = self._writer.ask({"pattern": pattern, "options": dict(options), **where})["why"]
        if not why and self._target.ask({})["bytes"] != pattern:
            return "the bytes that were written are not those that arrived"
        return why

    def finding(self, key: str, why: str) -> Finding:
        """What came of a write."""
        return Finding(key, not why, why or f"{self._nbytes} bytes written into another process were found there")


@contextlib.contextmanager
def siblings(
    engine: str, nbytes: int, environment: Mapping[str, str] = _NOTHING, errors: IO[bytes] | None = None
) -> Iterator[Siblings]:
    """Start both, and end them.

    Args:
        engine: its name, for `find.load`.
        nbytes: of the target's memory.
        environment: variables of the writer besides those of this process.
        errors: where the writer's standard error goes; None: nowhere.
    """
    with (
        Child(_CHILD, engine, "target", str(nbytes)) as target,
        Child(_CHILD, engine, "writer", environment=environment, errors=errors) as writer,
    ):
        yield Siblings(target, writer, nbytes)


def could_not_be_tried(key: str, error: BaseException) -> Finding:
    """What is said if a child failed."""
    return Finding(key, False, f"it could not be tried: {error}")
