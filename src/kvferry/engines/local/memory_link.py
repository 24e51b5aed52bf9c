"""The writer's end of cross-memory attach: copies by process_vm_writev, with the kernel's leave to trace the target."""

from __future__ import annotations

import errno
import hashlib

import numpy as np

from kvferry.engines.local.blob import Blob
from kvferry.engines.local.copier import Copier
from kvferry.engines.local.frames import Probe
from kvferry.engines.local.probe import NONCE_BYTES
from kvferry.engines.local.syscalls import error_name, read_memory, write_memory
from kvferry.engines.local.unix_link import RefusedError, UnixLink
from kvferry.engines.seam import Batch
from kvferry.ids import PeerId
from kvferry.plan.batch import U64


class MemoryLink(UnixLink):
    """Writes into the target's address space.

    The nonce read at the address that the blob names shows that the pid means the process that made the blob; its
    pidfd, looked at before and after each copy, that a number that was used again can't be taken for it.
    """

    mechanism = "cma"

    def __init__(self, blob: Blob, me: PeerId, copier: Copier) -> None:
        self._copier = copier
        super().__init__(blob, me)

    def _why_not_offered(self) -> str:
        return "" if self._blob.unix and self._blob.nonce_address else "the peer does not offer cross-memory attach"

    def _nonce(self) -> bytes:
        nonce = np.zeros(NONCE_BYTES, np.uint8)
        try:
            read_memory(self._pid, _one(nonce.ctypes.data, NONCE_BYTES), _one(self._blob.nonce_address, NONCE_BYTES))
        except OSError as error:
            raise RefusedError(_not_permitted("process_vm_readv", self._pid, error)) from error
        if hashlib.sha256(nonce.tobytes()).digest() != self._blob.nonce_digest:
            raise RefusedError(f"pid {self._pid} holds another nonce than the peer's blob says")
        return nonce.tobytes()

    def _write_probe(self, probe: Probe, fds: list[int]) -> None:  # noqa: ARG002 - this mechanism is sent none
        value = np.frombuffer(probe.value, np.uint8)
        try:
            write_memory(self._pid, _one(value.ctypes.data, len(value)), _one(probe.address, len(value)))
        except OSError as error:
            raise RefusedError(_not_permitted("process_vm_writev", self._pid, error)) from error

    def _copy(self, batch: Batch) -> tuple[str, str]:
        return self._copier.write(self._pid, batch)


def _not_permitted(call: str, pid: int, error: OSError) -> str:
    advice = "; ptrace rights are missing: same user, Yama, CAP_SYS_PTRACE" if error.errno == errno.EPERM else ""
    return f"{call} on pid {pid} says {error_name(error)}{advice}"


def _one(address: int, nbytes: int) -> U64:
    return np.array([[address, nbytes]], np.uint64)
