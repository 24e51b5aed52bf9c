"""What ships for tests, of kvferry and of its users: a cluster, an engine suite, a misbehaving engine, a simulator.

    from kvferry.testing import Cluster, EngineMachine, EngineSuite, Faulty

Each of them is imported when it is first used, so that neither pytest nor hypothesis is needed, or paid for, by
anybody else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.testing.cluster import Cluster
    from kvferry.testing.faulty import Faulty
    from kvferry.testing.machine import EngineMachine
    from kvferry.testing.suite import EngineSuite

__all__ = ["Cluster", "EngineMachine", "EngineSuite", "Faulty"]

_HOMES = {"Cluster": "cluster", "EngineMachine": "machine", "EngineSuite": "suite", "Faulty": "faulty"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
