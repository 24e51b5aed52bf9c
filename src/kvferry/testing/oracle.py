"""The oracle: the dullest possible program for what a transfer must do, with loops and without the planner.

A logical cache gives every element (space, layer, field, head, position) its own bytes. Each rank's memory is
filled by hand from its layout and page lists; after a copy every byte is compared, guards and foreign pages
included.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.layout.bind import bind
from kvferry.layout.space import Cyclic, Deal, Rows, Slot, Space, Window
from kvferry.layout.tensor import Device, Host, Layout, Tensor
from kvferry.plan.batch import Batch
from kvferry.plan.runs import PageList
from kvferry.testing.suite_memory import PLAIN, device_of, new_pool

SENTINEL = 0xEE
"""What memory holds before anything is written."""

Key = tuple[str, int, str, int, int]
"""Space, layer, field, head (-1: no head axis), position in granules."""
Cells = Mapping[Key, tuple[int, int]]
"""Element -> (address, nbytes)."""


@lru_cache(maxsize=1 << 16)
def pattern(key: Key, nbytes: int) -> bytes:
    """The bytes of one element of the logical cache."""
    return hashlib.shake_128(repr(key).encode()).digest(nbytes)


def held_positions(deal: Deal, num_tokens: int) -> list[int]:
    """The tokens that a rank holds, in slot order."""
    if isinstance(deal, Cyclic):
        return [token for token in range(num_tokens) if token // deal.unit_tokens % deal.ranks == deal.rank]
    units = -(-num_tokens // deal.unit_tokens)
    part_of_unit = []
    for part in range(deal.parts):
        part_of_unit += [part] * (units // deal.parts + (part < units % deal.parts))
    return [token for token in range(num_tokens) if part_of_unit[token // deal.unit_tokens] in deal.owned]


def covered_positions(space: Space, prefix_tokens: int, num_tokens: int, rows: int = 0) -> list[int]:
    """The positions that a request covers on this rank's side, in order, whoever holds them."""
    coverage = space.coverage
    if isinstance(coverage, Slot):
        return [0]
    if isinstance(coverage, Rows):
        return list(range(rows * space.page_tokens))
    first = 0
    if isinstance(coverage, Window):
        while first + space.page_tokens <= num_tokens - coverage.tokens:
            first += space.page_tokens
    return list(range(max(first, prefix_tokens), num_tokens))


def slots_of(space: Space, prefix_tokens: int, num_tokens: int, rows: int = 0) -> dict[int, int]:
    """Position -> slot of what the rank holds and the request covers."""
    covered = set(covered_positions(space, prefix_tokens, num_tokens, rows))
    count = rows * space.page_tokens if isinstance(space.coverage, Rows) else max(num_tokens, 1)
    everything = held_positions(space.deal, count)
    return {position: slot for slot, position in enumerate(everything) if position in covered}


def pages_of(space: Space, prefix_tokens: int, num_tokens: int, rows: int = 0) -> list[int]:
    """The logical pages (slot // page_tokens) that a page list has to name, in order."""
    slots = slots_of(space, prefix_tokens, num_tokens, rows).values()
    return sorted({slot // space.page_tokens for slot in slots})


def cells(layout: Layout, pages: Mapping[str, PageList], prefix_tokens: int, num_tokens: int, rows: int = 0) -> Cells:
    """Where each element of a request lies in one rank's memory."""
    spaces = {space.name: space for space in layout.spaces}
    found = {}
    for tensor in layout.tensors:
        space = spaces[tensor.space]
        for position, slot in slots_of(space, prefix_tokens, num_tokens, rows).items():
            index = slot // space.page_tokens - pages[space.name].first_slot // space.page_tokens
            page = int(pages[space.name].indices[index])
            for key, address, nbytes in _elements(tensor, position, page, slot % space.page_tokens):
                found[key] = (address, nbytes)
    return found


def _elements(tensor: Tensor, position: int, page: int, offset: int) -> Iterator[tuple[Key, int, int]]:
    heads = [head for h0, h1 in tensor.heads for head in range(h0, h1)] or [-1]
    granule = tensor.fields[0].granule_tokens
    strides = tensor.strides_bytes
    for i, layer in enumerate(tensor.layers):
        for h, head in enumerate(heads):
            address = tensor.address + i * strides.layer + h * strides.head
            address += page * strides.page + offset // granule * strides.token
            for item in tensor.fields:
                yield (tensor.space, layer, item.name, head, position // granule), address, item.nbytes
                address += item.nbytes


@dataclass
class Memory:
    """One rank's memory: a buffer with guards on both sides, all SENTINEL at first.

    Attributes:
        layout: the layout, bound to the buffer.
        provider: where the buffer comes from, "module:function" (see `suite_memory`).
        buffer: uint8[N] the memory, guards included.
        expected: uint8[N] what the buffer must hold after the copy.
    """

    layout: Layout
    guard_bytes: int = 64
    provider: str = PLAIN
    buffer: npt.NDArray[np.uint8] = field(init=False)
    expected: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        size = max(tensor.address + tensor.nbytes for tensor in self.layout.tensors)
        self.buffer = new_pool(self.provider, size + 2 * self.guard_bytes)
        self.buffer[:] = SENTINEL
        self.expected = np.full(len(self.buffer), SENTINEL, np.uint8)
        bound = bind(self.layout, [(self.buffer.ctypes.data + self.guard_bytes, size)])
        self.layout = _on_device(bound, device_of(self.buffer))

    def fill(self, where: Cells) -> None:
        """Write the logical cache into the memory, as the prefill engine would."""
        self.expect(where, where)
        self.write(where)

    def write(self, where: Cells) -> None:
        """Let the memory hold what is expected of these elements, and of nothing else."""
        for address, nbytes in where.values():
            at = address - self.buffer.ctypes.data
            self.buffer[at : at + nbytes] = self.expected[at : at + nbytes]

    def expect(self, where: Cells, held: Iterable[Key]) -> None:
        """Note that the elements `held` must arrive at their places in `where`."""
        for key in held:
            if key in where:
                address, nbytes = where[key]
                at = address - self.buffer.ctypes.data
                self.expected[at : at + nbytes] = np.frombuffer(pattern(key, nbytes), np.uint8)

    def accept(self, where: Cells) -> None:
        """Expect of these elements what they hold now."""
        for address, nbytes in where.values():
            at = address - self.buffer.ctypes.data
            self.expected[at : at + nbytes] = self.buffer[at : at + nbytes]

    def differences(self, where: Cells) -> str:
        """Say which bytes are not as expected; "" if all are, guards and foreign pages included."""
        wrong = np.flatnonzero(self.buffer != self.expected)
        if not len(wrong):
            return ""
        at = int(wrong[0])
        address = self.buffer.ctypes.data + at
        owner = next((key for key, (start, n) in where.items() if start <= address < start + n), None)
        return (
            f"{len(wrong)} bytes differ, first at byte {at} of {len(self.buffer)} (element {owner}): "
            f"is {self.buffer[at]:#04x}, must be {self.expected[at]:#04x}"
        )


def _on_device(layout: Layout, device: int) -> Layout:
    """Say of all tensors that they lie on a device; -1 is host memory."""
    where = Device(device) if device >= 0 else Host()
    tensors = tuple(msgspec.structs.replace(tensor, memory=where) for tensor in layout.tensors)
    return msgspec.structs.replace(layout, tensors=tensors)


def copy_batches(batches: Iterable[Batch]) -> int:
    """Carry batches out inside this process; returns the number of bytes."""
    total = 0
    for batch in batches:
        for src, dst, nbytes in zip(batch.src.tolist(), batch.dst.tolist(), batch.nbytes.tolist(), strict=True):
            ctypes.memmove(dst, src, nbytes)
            total += nbytes
    return total
