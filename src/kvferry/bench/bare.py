"""An engine's own library, driven without kvferry over the same memory: which engines that is known of, and how.

Modules of drivers import nothing of a library before a driver is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol

from kvferry.engines import find
from kvferry.errors import InputError
from kvferry.plan import Batch

DRIVERS = {"nixl": "kvferry.bench.bare_nixl:Driver", "mooncake": "kvferry.bench.bare_mooncake:Driver"}
"""By engine. The local engine has no library below it: a memcpy and a plain stream are what it is measured against."""

Block = tuple[int, int]
"""Address and bytes."""


class Bare(Protocol):
    """One side's end. Everything that the library raises is passed on: a measurement does not go on without it."""

    def __init__(self, pools: Sequence[Block]) -> None:
        """Start the library and register memory."""
        ...

    def describe(self) -> str:
        """What the other side has to know."""
        ...

    def attach(self, described: str) -> None:
        """Writer: get to know the other side."""
        ...

    def write(self, batches: Sequence[Batch]) -> None:
        """Writer: write batches, one call of the library for each, made of the rows; returns when all is done."""
        ...

    def tell(self) -> None:
        """Writer: let `serve` at the other side end."""
        ...

    def serve(self, limit_s: float) -> None:
        """Target: do what the library needs done while it is written to."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


def check(engine: str, wanted: bool | None) -> None:
    """Refuse what can't be driven bare. Raises InputError, or UnknownEngine."""
    if wanted and find.canonical(engine) not in DRIVERS:
        raise InputError(
            f"--bare: no way is known to drive what is below the engine {engine!r}",
            hint=f"it is possible for {', '.join(DRIVERS)}",
        )


def is_measured(engine: str, wanted: bool | None) -> bool:
    """Whether a run drives the library bare: it does wherever it can, unless it was told not to."""
    return find.canonical(engine) in DRIVERS and wanted is not False


def make(engine: str, pools: Sequence[Block]) -> Bare:
    """Start one side's end."""
    module, _, name = DRIVERS[find.canonical(engine)].partition(":")
    made: Bare = getattr(importlib.import_module(module), name)(pools)
    return made
