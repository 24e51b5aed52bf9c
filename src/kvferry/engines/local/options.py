"""The local engine's own settings, given as text (KVFERRY_ENGINE_OPTIONS=name=value,...)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from kvferry.engines.option_text import number_of
from kvferry.errors import ConfigError

MECHANISMS = ("auto", "shm", "cma", "tcp")
MAX_NUMBER = 16


class Options(NamedTuple):
    """The settings.

    Attributes:
        mechanism: "auto", or the only one that may be used.
        tcp_connections: the most TCP connections to one peer, and the threads that send and that receive.
        copy_threads: threads that copy a large batch by cross-memory attach, the caller's included.
    """

    mechanism: str = "auto"
    tcp_connections: int = 2
    copy_threads: int = 2


def parse(options: Mapping[str, str]) -> Options:
    """Read the settings; raises ConfigError for an unknown name or a value that is none."""
    unknown = sorted(set(options) - set(Options._fields))
    if unknown:
        names = ", ".join(map(repr, Options._fields))
        raise ConfigError(f"the local engine has no option {unknown[0]!r}", hint=f"its options are {names}")
    mechanism = options.get("mechanism", "auto")
    if mechanism not in MECHANISMS:
        raise ConfigError(
            f"option 'mechanism' of the local engine is {mechanism!r}", hint=f"one of {', '.join(MECHANISMS)}"
        )
    return Options(
        mechanism,
        number_of(options, "tcp_connections", 2, "local", most=MAX_NUMBER),
        number_of(options, "copy_threads", min(2, os.cpu_count() or 1), "local", most=MAX_NUMBER),
    )
