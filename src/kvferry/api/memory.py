"""Memory given by callers: numpy arrays, torch tensors, raw pointers. Nothing is imported to look at them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvferry.errors import ConfigError
from kvferry.layout import LOWEST_ADDRESS, Layout, bind, plain
from kvferry.node.aux import AuxBuffer


class Block(NamedTuple):
    """A contiguous block of memory.

    Attributes:
        address: first byte.
        nbytes: length.
        rows: length of the first axis; 1 where there is none.
    """

    address: int
    nbytes: int
    rows: int = 1


@dataclass(frozen=True)
class KVArgs:
    """What a rank registers.

    Attributes:
        layout: what it holds; unbound, or bound to memory already.
        buffers: the memory: one block for all tensors or one for each, as numpy arrays, torch tensors or
            (address, nbytes); empty if the layout is bound. They are kept alive.
        aux: metadata buffers, two-dimensional [slots, anything]; slot i of each belongs to one request. A raw
            (address, nbytes, item_bytes) will do.
        group: decode side: layouts of all ranks that serve the same requests, this one included; empty = only this.
            A prefill rank learns from it how many ranks it has to serve: without it a room of several decode ranks
            is over for prefill after the first one, and the others fail. Prefill needs none.
    """

    layout: Layout
    buffers: Sequence[Any] = ()
    aux: Sequence[Any] = ()
    group: Sequence[Layout] = field(default=())

    def bound(self) -> Layout:
        """The layout with addresses. Raises LayoutError or ConfigError."""
        layout = plain(self.layout, "the layout")
        blocks = [
            block_of(buffer, f"buffer {number}") for number, buffer in enumerate(_listed(self.buffers, "buffers"))
        ]
        return bind(layout, [(block.address, block.nbytes) for block in blocks]) if blocks else layout

    def grouped(self) -> tuple[Layout, ...]:
        """The group's layouts. Raises LayoutError or ConfigError."""
        return tuple(
            plain(each, f"layout {number} of group") for number, each in enumerate(_listed(self.group, "group"))
        )

    def aux_buffers(self) -> list[AuxBuffer]:
        """The metadata buffers. Raises ConfigError."""
        return [_aux_of(buffer, f"aux buffer {number}") for number, buffer in enumerate(_listed(self.aux, "aux"))]


def block_of(buffer: Any, name: str) -> Block:
    """Address and length of what a caller gave.

    Raises:
        ConfigError: it is nothing that is known, or it is not contiguous.
    """
    if isinstance(buffer, tuple) and len(buffer) in {2, 3}:
        return Block(*_whole(buffer[:2], name))
    if hasattr(buffer, "data_ptr"):  # a torch tensor, on whatever device
        if not buffer.is_contiguous():
            raise ConfigError(f"{name}: the tensor is not contiguous", hint="register the storage that it views")
        rows = int(buffer.shape[0]) if len(buffer.shape) else 1
        return Block(int(buffer.data_ptr()), int(buffer.numel()) * int(buffer.element_size()), rows)
    described = getattr(buffer, "__array_interface__", None)
    if described is None:
        hint = "pass a numpy array, a torch tensor or (address, nbytes)"
        raise ConfigError(f"{name}: {type(buffer).__name__} is no memory that kvferry knows", hint=hint)
    if described.get("strides") is not None:
        raise ConfigError(f"{name}: the array is not C-contiguous", hint="register the array that it views")
    if described["data"][1]:
        raise ConfigError(f"{name}: the array is read-only")
    shape, dtype = described["shape"], np.dtype(described["typestr"])
    if dtype.hasobject or dtype.kind not in "biufcV":
        raise ConfigError(f"{name}: dtype {dtype} is no plain data", hint="view it as bytes (numpy.uint8)")
    item_bytes = dtype.itemsize
    return Block(int(described["data"][0]), math.prod(shape) * item_bytes, int(shape[0]) if shape else 1)


def _aux_of(buffer: Any, name: str) -> AuxBuffer:
    if isinstance(buffer, tuple):
        if len(buffer) != 3:
            raise ConfigError(f"{name}: pass (address, nbytes, item_bytes), not {len(buffer)} numbers")
        address, nbytes, item_bytes = _whole(buffer, name)
        if address < LOWEST_ADDRESS:
            raise ConfigError(f"{name}: address {address:#x} is no address: no system maps page 0")
        return AuxBuffer(address, nbytes, item_bytes)
    block = block_of(buffer, name)
    if not block.nbytes:
        raise ConfigError(f"{name}: it is empty", hint="give it one row per request slot")
    return AuxBuffer(block.address, block.nbytes, block.nbytes // block.rows)


def _listed(given: Any, name: str) -> Sequence[Any]:
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        return given
    raise ConfigError(f"{name} is {type(given).__name__}, not a list", hint=f"pass {name}=[...]")


def _whole(numbers: Sequence[Any], name: str) -> list[int]:
    try:
        return [operator.index(number) for number in numbers]
    except TypeError as error:
        raise ConfigError(f"{name}: {tuple(numbers)!r} are no whole numbers: {error}") from None
