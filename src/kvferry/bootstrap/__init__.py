"""The bootstrap registry: prefill ranks register, decode ranks look the topology up."""

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
from kvferry.bootstrap.registry import Registry
from kvferry.bootstrap.server import BootstrapServer

__all__ = [
    "DEFAULT_PORT",
    "DEFAULT_TTL_S",
    "RENEWALS_PER_TTL",
    "BootstrapClient",
    "BootstrapServer",
    "ConflictError",
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
