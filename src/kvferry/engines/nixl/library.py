"""The native library: which build of it there is, how it is imported."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
from types import ModuleType
from typing import NamedTuple

from kvferry.engines.devices import rdma_devices
from kvferry.errors import EngineUnavailable

INSTALL = "pip install --no-deps nixl-cu12==1.5.1"
BUILDS = ("nixl_cu12", "nixl_cu13")
"""Either works without CUDA. The meta package `nixl` is not asked: importing it may import torch."""

_LIBNL = "libnl-route-3.so.200"

RETRIES = "UCX_RC_VERBS_RETRY_COUNT"
_RETRIES_OF_ALL = "UCX_RC_RETRY_COUNT"
_MOST_RETRIES = "6"
"""UCX's own 7 is taken for endless by Soft-RoCE: a write to a peer that is gone would never end."""


class Library(NamedTuple):
    """An imported build.

    Attributes:
        build: name of its module.
        version: of its distribution.
        api: the module that holds nixl_agent and nixl_agent_config.
    """

    build: str
    version: str
    api: ModuleType


def find() -> str:
    """Name the build that is installed, without importing it.

    Raises:
        EngineUnavailable: none is.
    """
    for build in BUILDS:
        if importlib.util.find_spec(build) is not None:
            return build
    raise EngineUnavailable(f"none of the packages {', '.join(BUILDS)} is installed", hint=INSTALL)


def load() -> Library:
    """Import the build that is installed.

    Raises:
        EngineUnavailable: none is, or it can't be imported.
    """
    build = find()
    # its logger writes to the standard output, and so does UCX, where commands print their results
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    limit_retries()
    # the wheel has a copy of libnl of its own; loaded first, it makes a process crash at its end that UCX
    # afterwards gives the system's copy as well
    with contextlib.suppress(OSError):
        ctypes.CDLL(_LIBNL)
    try:
        api = importlib.import_module(f"{build}._api")
    except Exception as error:
        # whatever foreign code raises while it is imported concerns this engine alone
        raise EngineUnavailable(f"{build} can't be imported: {type(error).__name__}: {error}", hint=INSTALL) from error
    return Library(build, version(build), api)


def limit_retries() -> str:
    """Have UCX give a peer up that does not answer by RDMA, unless something else is set; says how many retries count.

    Where there is no RDMA device nothing is set, since UCX warns of what it does not need, and "" is returned.
    """
    if rdma_devices() and _RETRIES_OF_ALL not in os.environ:
        return os.environ.setdefault(RETRIES, _MOST_RETRIES)
    return os.environ.get(RETRIES, os.environ.get(_RETRIES_OF_ALL, ""))


def version(build: str) -> str:
    """Version of an installed build, or "unknown"."""
    try:
        return importlib.metadata.version(build.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
