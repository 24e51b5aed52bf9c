"""The bootstrap registry: prefill ranks register, decode ranks look the topology up.

The server is imported when it is first used: workers need no web server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.bootstrap.address import DEFAULT_PORT, join_address, parse_address
from kvferry.bootstrap.client import BootstrapClient
from kvferry.bootstrap.records import (
    DEFAULT_TTL_S,
    RENEWALS_PER_TTL,
    ConflictError,
    Health,
    RankEntry,
    Readiness,
    RefusedError,
    Registered,
    Topology,
    renew_due,
)
from kvferry.bootstrap.registry import ForeignRoute, Registry

if TYPE_CHECKING:
    from kvferry.bootstrap.server import BootstrapServer

__all__ = [
    "DEFAULT_PORT",
    "DEFAULT_TTL_S",
    "RENEWALS_PER_TTL",
    "BootstrapClient",
    "BootstrapServer",
    "ConflictError",
    "ForeignRoute",
    "Health",
    "RankEntry",
    "Readiness",
    "RefusedError",
    "Registered",
    "Registry",
    "Topology",
    "join_address",
    "parse_address",
    "renew_due",
]


def __getattr__(name: str) -> Any:
    if name != "BootstrapServer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.bootstrap.server import BootstrapServer

    return BootstrapServer
