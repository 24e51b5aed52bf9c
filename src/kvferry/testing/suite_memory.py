"""Where the engine suite takes its pools from: a function by name, so that a second process can call it as well."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt

from kvferry.engines.seam import Region
from kvferry.errors import EngineUnavailable
from kvferry.pool import allocate_pool

Bytes = npt.NDArray[np.uint8]

PLAIN = "kvferry.testing.suite_memory:plain"

KINDS = {
    "plain": PLAIN,
    "private": "kvferry.testing.suite_memory:private",
    "memfd": "kvferry.testing.suite_memory:memfd",
    "cuda": "kvferry.testing.suite_cuda:cuda",
}
"""Names that the option --kvferry-memory knows -> provider."""


def new_pool(memory: str, nbytes: int) -> Bytes:
    """Call the provider "module:function" with a size in bytes; the array must keep its memory alive.

    What a provider of device memory returns only behaves like an array (`kvferry.testing.suite_cuda`).

    Raises:
        EngineUnavailable: there is no such memory here; the hint says why.
    """
    return cast("Bytes", provider(memory)(nbytes))


def provider(memory: str) -> Callable[[int], object]:
    """Import the function "module:function"."""
    module, _, function = memory.partition(":")
    return cast("Callable[[int], object]", getattr(importlib.import_module(module), function))


def kind_of(memory: str) -> str:
    """The short name of a provider, for people."""
    return next((kind for kind, known in KINDS.items() if known == memory), memory)


def address_of(pool: Bytes) -> int:
    """Where a pool lies: in this process, or on its device."""
    return int(pool.ctypes.data)


def device_of(pool: Bytes) -> int:
    """The index of the device that a pool lies on; -1 is host memory."""
    return int(getattr(pool, "device_index", -1))


def region_of(pool: Bytes) -> Region:
    """A whole pool, to register."""
    return Region(address_of(pool), pool.nbytes, device_of(pool))


def refusal_of(memory: str) -> str:
    """Why there is no such memory here, or ""."""
    try:
        new_pool(memory, 4096)
    except EngineUnavailable as error:
        return str(error)
    return ""


def plain(nbytes: int) -> Bytes:
    """What numpy allocates."""
    return np.zeros(nbytes, np.uint8)


def private(nbytes: int) -> Bytes:
    """A private pool."""
    return allocate_pool(nbytes).array


def memfd(nbytes: int) -> Bytes:
    """A memfd pool, which peers can map."""
    return allocate_pool(nbytes, kind="memfd").array
