"""A page of this process that peers read a nonce from and write their probe to.

One nonce page per process, mapped once and never unmapped: a probe that comes late (its writer was stopped, or the
engine has closed since) then still hits a scratch word and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import mmap
import secrets

from kvferry.pool import allocate_pool

Page = mmap.mmap | memoryview

NONCE_BYTES = 32
PROBE_BYTES = 16
_PAGE_BYTES = 4096
_SLOTS = (_PAGE_BYTES - NONCE_BYTES) // PROBE_BYTES


class Slots:
    """Scratch words of a page, handed out in turn.

    Args:
        page: 4096 bytes that can be written.
        address: where writers find the page: its address, or 0 where they map it themselves.
    """

    def __init__(self, page: Page, address: int) -> None:
        self._page = page
        self._turn = itertools.count()
        self.address = address

    def new_slot(self) -> int:
        """The address of a scratch word, zeroed; used again by others after some 250 more."""
        offset = NONCE_BYTES + PROBE_BYTES * (next(self._turn) % _SLOTS)
        self._page[offset : offset + PROBE_BYTES] = bytes(PROBE_BYTES)
        return self.address + offset

    def read_slot(self, address: int) -> bytes:
        """What lies in a scratch word now."""
        offset = address - self.address
        return bytes(self._page[offset : offset + PROBE_BYTES])


class ProbePage(Slots):
    """The nonce, and scratch words for those who write to this process's address space."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, _PAGE_BYTES)
        super().__init__(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.digest = hashlib.sha256(self.nonce).digest()
        memory[:NONCE_BYTES] = self.nonce


class SharedProbePage(Slots):
    """Scratch words for those who map what they are given the descriptor of; raises PoolError if there is none."""

    def __init__(self) -> None:
        self._pool = allocate_pool(_PAGE_BYTES, kind="memfd")
        super().__init__(self._pool.array.data, 0)

    @property
    def fd(self) -> int:
        """The page's memfd; it belongs to the page."""
        return self._pool.fd

    def close(self) -> None:
        """Close the descriptor."""
        self._pool.close()


@functools.cache
def probe_page() -> ProbePage:
    """The process's page."""
    return ProbePage()
