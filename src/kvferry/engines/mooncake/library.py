"""The library `mooncake.engine`: importing it, what it lacks, its version, and its settings in the environment."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
from typing import Any, NoReturn

from kvferry.errors import ConfigError, EngineUnavailable

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
DEBIAN = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Shared libraries that its wheels expect on the system, and the Debian packages that have them."""

INSTALL = f"pip install --no-deps {WHEEL}; on Debian also apt-get install {' '.join(DEBIAN.values())}"

SLICE_BYTES = 64 << 10
"""The library's default for MC_TCP_SLICE_SIZE: what a target reads from one connection before it turns to the next."""


LANES = ("MC_TCP_LANES_PER_PEER", "MC_TCP_MAX_CONNECTIONS_PER_PEER")
"""How many connections the library opens to a peer, as they are needed: its setting, and that one's older name."""

MOST_LANES = 16
"""The most that it takes, and what is set here. Its default is 4, each with one row under way, and both sides' threads
then sleep and wake once for nearly every row."""


def check_installed() -> None:
    """Look whether the library can be imported, without doing so: it reads its settings while it is.

    Raises:
        EngineUnavailable: it is not installed, or a library that it needs is missing; says which.
    """
    lacking = missing_packages()
    if lacking:
        _unavailable(f"these Debian packages are missing: {', '.join(lacking)}")
    try:
        found = importlib.util.find_spec("mooncake.engine")
    except ImportError as error:
        _unavailable(str(error))
    if found is None:
        _unavailable("there is no module mooncake.engine")


def engine_class() -> Any:
    """Import the library, which starts threads, and return its class TransferEngine; raises EngineUnavailable."""
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        _unavailable(str(error))
    return TransferEngine


def _unavailable(why: str) -> NoReturn:
    raise EngineUnavailable(f"Mooncake's transfer engine can't be imported: {why}", hint=INSTALL)


def missing_packages() -> list[str]:
    """The Debian packages whose shared libraries are not found on this system."""
    return [package for file, package in DEBIAN.items() if not _loads(file)]


@functools.cache
def version() -> str:
    """The version of the installed distribution with its name; "" if there is none."""
    names = importlib.metadata.packages_distributions().get("mooncake", [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else ""


def check_environment() -> None:
    """Refuse settings of the library under which this engine's outcomes would not be true.

    Raises:
        ConfigError: a variable, which it names, has such a value.
    """
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise ConfigError("MC_TCP_PROTO=1 makes Mooncake call writes done that nobody acknowledged", hint="unset it")
    text = os.environ.get("MC_TCP_SLICE_SIZE", "")
    if text.isdecimal() and 0 < int(text) < SLICE_BYTES:
        raise ConfigError(f"MC_TCP_SLICE_SIZE is {text}, below {SLICE_BYTES}", hint="unset it")


def set_environment(timeout_s: int, ports: tuple[int, int], *, ipv6: bool) -> None:
    """Hand settings to the library by the environment of the process; all but the time only before it is imported.

    Args:
        timeout_s: after how many seconds a transfer is given up.
        ports: (first, last) port that its engines listen on; (0, 0) leaves what is there.
        ipv6: whether addresses are IPv6; the library can't have both in one process.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if not any(name in os.environ for name in LANES):
        os.environ[LANES[0]] = str(MOST_LANES)
    wanted = {"MC_TRANSFER_TIMEOUT": str(timeout_s)}
    if ports != (0, 0):
        wanted |= {"MC_MIN_RPC_PORT": str(ports[0]), "MC_MAX_RPC_PORT": str(ports[1])}
    if ipv6:
        wanted["MC_USE_IPV6"] = "1"
    for name, value in wanted.items():
        # the library's threads read the environment without a lock: it is written only where it changes
        if os.environ.get(name) != value:
            os.environ[name] = value


def _loads(file: str) -> bool:
    try:
        ctypes.CDLL(file)
    except OSError:
        return False
    return True
