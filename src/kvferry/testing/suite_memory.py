"""Where the engine suite takes its pools from: a function by name, so that a second process can call it as well."""

from __future__ import annotations

import importlib
from typing import cast

import numpy as np
import numpy.typing as npt

from kvferry.pool import allocate_pool

Bytes = npt.NDArray[np.uint8]

PLAIN = "kvferry.testing.suite_memory:plain"


def new_pool(memory: str, nbytes: int) -> Bytes:
    """Call the provider "module:function" with a size in bytes; the array must keep its memory alive."""
    module, _, function = memory.partition(":")
    return cast("Bytes", getattr(importlib.import_module(module), function)(nbytes))


def plain(nbytes: int) -> Bytes:
    """What numpy allocates."""
    return np.zeros(nbytes, np.uint8)


def private(nbytes: int) -> Bytes:
    """A private pool."""
    return allocate_pool(nbytes).array


def memfd(nbytes: int) -> Bytes:
    """A memfd pool, which peers can map."""
    return allocate_pool(nbytes, kind="memfd").array
