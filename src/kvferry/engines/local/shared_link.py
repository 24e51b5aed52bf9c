"""The writer's end of shared memory: it maps the target's pools and copies rows into them, without any ptrace right."""

from __future__ import annotations

import ctypes
import sys

from kvferry.engines.local.blob import Blob
from kvferry.engines.local.frames import Packet, Probe, Share
from kvferry.engines.local.iovec import merged_rows
from kvferry.engines.local.probe import PROBE_BYTES
from kvferry.engines.local.shared_map import SharedMap
from kvferry.engines.local.syscalls import error_name
from kvferry.engines.local.unix_link import RefusedError, UnixLink
from kvferry.engines.seam import Batch
from kvferry.errors import PoolError, WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import U64
from kvferry.pool import map_memfd

_memory = memoryview((ctypes.c_uint8 * (sys.maxsize - 1)).from_address(1)).cast("B")
"""All of this process's address space but byte 0; what lies at address a is item a - 1."""


class SharedLink(UnixLink):
    """Writes into its own mapping of the target's pools. The token in the blob is the proof that it may."""

    mechanism = "shm"

    def __init__(self, blob: Blob, me: PeerId) -> None:
        self._map = SharedMap()
        super().__init__(blob, me)

    def _why_not_offered(self) -> str:
        return (
            ""
            if self._blob.unix and not self._blob.why_not_shared
            else (self._blob.why_not_shared or "the peer does not offer shared memory")
        )

    def _nonce(self) -> bytes:
        return b""

    def _write_probe(self, probe: Probe, fds: list[int]) -> None:
        if len(fds) != 1:
            raise WireError(f"the peer sent {len(fds)} descriptors with its probe, not 1")
        try:
            page = map_memfd(fds[0])
        except (OSError, PoolError) as error:
            raise RefusedError(f"the peer's probe page can't be mapped: {_words(error)}") from error
        if not 0 <= probe.address <= len(page) - PROBE_BYTES or len(probe.value) != PROBE_BYTES:
            raise WireError(f"a probe of {len(probe.value)} bytes at {probe.address} of a page of {len(page)}")
        page[probe.address : probe.address + PROBE_BYTES] = list(probe.value)

    def _told(self, packet: Packet, fds: list[int]) -> None:
        if not isinstance(packet, Share):
            super()._told(packet, fds)
            return
        try:
            self._map.add(packet.parts, fds)
        except (OSError, PoolError) as error:
            raise RefusedError(f"the peer's pool can't be mapped: {_words(error)}") from error

    def _admitted(self) -> None:
        self._map.complete()

    def _copy(self, batch: Batch) -> tuple[str, str]:
        here, outside = self._map.here(batch.dst, batch.nbytes)
        if outside is not None:
            return (
                f"row {outside} of {len(batch)}, {int(batch.nbytes[outside])} bytes at {int(batch.dst[outside]):#x} "
                "there, does not lie in the memory that the peer shares; nothing is written"
            ), "refused"
        copy_rows(batch.src, here, batch.nbytes)
        return "", ""

    def _let_go(self) -> None:
        self._map.close()


def copy_rows(src: U64, dst: U64, nbytes: U64) -> None:
    """Copy rows inside this process. The interpreter lock is held, so other threads run between rows only (ADR 0008).

    Args:
        src: uint64[N] checked addresses.
        dst: uint64[N] checked addresses.
        nbytes: uint64[N] bytes per row.
    """
    src, dst, nbytes = merged_rows(src, dst, nbytes)
    ends = ((src + nbytes) - 1).tolist(), ((dst + nbytes) - 1).tolist()
    memory = _memory
    for here, here_end, there, there_end in zip((src - 1).tolist(), ends[0], (dst - 1).tolist(), ends[1], strict=True):
        memory[there:there_end] = memory[here:here_end]


def _words(error: OSError | PoolError) -> str:
    return str(error) if isinstance(error, PoolError) else f"{error_name(error)} ({error.strerror})"
