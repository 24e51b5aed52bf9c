"""A page of this process that peers read a nonce from and write their probe to.

One page per process, mapped once and never unmapped: a probe that comes late (its writer was stopped, or the
engine has closed since) then still hits a scratch word and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import mmap
import secrets

NONCE_BYTES = 32
PROBE_BYTES = 16
_PAGE_BYTES = 4096
_SLOTS = (_PAGE_BYTES - NONCE_BYTES) // PROBE_BYTES


class ProbePage:
    """The nonce, and scratch words that are handed out in turn."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _PAGE_BYTES)
        self._turn = itertools.count()
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.digest = hashlib.sha256(self.nonce).digest()
        self._memory[:NONCE_BYTES] = self.nonce

    def new_slot(self) -> int:
        """The address of a scratch word, zeroed; used again by others after some 250 more."""
        offset = NONCE_BYTES + PROBE_BYTES * (next(self._turn) % _SLOTS)
        self._memory[offset : offset + PROBE_BYTES] = bytes(PROBE_BYTES)
        return self.address + offset

    def read_slot(self, address: int) -> bytes:
        """What lies in a scratch word now."""
        offset = address - self.address
        return self._memory[offset : offset + PROBE_BYTES]


@functools.cache
def probe_page() -> ProbePage:
    """The process's page."""
    return ProbePage()
