"""The writer's end of cross-memory attach: the handshake, then copies by process_vm_writev."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import socket

import numpy as np

from kvferry.engines.local import frames
from kvferry.engines.local.blob import Blob, host_identity
from kvferry.engines.local.frames import Bye, Knock, No, Packet, Probe, Probed, Yes
from kvferry.engines.local.iovec import Cursor, row_at, vectors_of
from kvferry.engines.local.link import State
from kvferry.engines.local.probe import NONCE_BYTES
from kvferry.engines.local.syscalls import (
    error_name,
    peer_credentials,
    peer_pidfd,
    read_memory,
    write_memory,
)
from kvferry.engines.seam import Batch, Done, Outcome, Ticket
from kvferry.errors import WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import U64


class _RefusedError(Exception):
    """Cross-memory attach can't be used with this peer; the text says why."""


class MemoryLink:
    """Writes straight into the target's memory; `submit` returns when the copy has ended.

    The target's pid is the kernel's word for who listens on its socket; the nonce read at the address that
    the blob names shows that the pid still means that process. Its pidfd is looked at before and after each
    copy, so that a number that was used again can't be taken for it.
    """

    mechanism = "cma"

    def __init__(self, blob: Blob, me: PeerId) -> None:
        self.state = State.OPENING
        self.why = ""
        self.done: list[Done] = []
        self._blob = blob
        self._me = me
        self._pid = 0
        self._pidfd = -1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._ended = select.poll()
        try:
            self._knock()
        except _RefusedError as refusal:
            self._lose(str(refusal))

    def fileno(self) -> int:
        """The Unix socket."""
        return self._socket.fileno()

    def wants_write(self) -> bool:
        """Never: what it sends is a few bytes."""
        return False

    def step(self) -> None:
        """Hear what the target says; in the end that it has closed."""
        try:
            raw = self._socket.recv(frames.MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        try:
            if not raw:
                raise _RefusedError("the peer has closed the attachment or has ended")
            self._hear(frames.decode_packet(raw))
        except (_RefusedError, WireError) as error:
            self._lose(str(error))

    def submit(self, ticket: Ticket, batch: Batch) -> None:
        """Copy a batch now; the outcome is in `done`."""
        if self._has_ended():
            self.done.append(Done(ticket, Outcome.FAILED_QUIET, self.why, "ESRCH"))
            return
        landed, error = copy_rows(self._pid, batch)
        if error is None and self._has_ended():
            error = OSError(errno.ESRCH, f"meanwhile {self.why}")
        if error is None:
            self.done.append(Done(ticket, Outcome.LANDED))
        else:
            cause = _short_copy(batch, landed, error)
            self.done.append(Done(ticket, Outcome.FAILED_QUIET, cause, error_name(error)))

    def close(self) -> None:
        """Promise the target that nothing more is written, and close."""
        self._lose("detached")

    def _knock(self) -> None:
        self._check_host()
        try:
            self._socket.connect(f"\0{self._blob.unix}")
        except OSError as error:
            raise _RefusedError(f"the peer's Unix socket can't be reached ({error_name(error)})") from error
        pid, uid = peer_credentials(self._socket)
        if uid != os.geteuid():
            raise _RefusedError(f"the peer (pid {pid}) runs as user {uid}, this process as {os.geteuid()}")
        try:
            self._pidfd = peer_pidfd(self._socket, pid)
        except OSError as error:
            raise _RefusedError(f"no pidfd for the peer (pid {pid}, {error_name(error)})") from error
        self._pid = pid
        self._ended.register(self._pidfd, select.POLLIN)
        self._ended.register(self._socket.fileno(), select.POLLIN)
        proof = frames.knock_proof(self._blob.token, self._read_nonce(), self._me)
        self._say(Knock(self._me, proof))

    def _check_host(self) -> None:
        if not self._blob.unix:
            raise _RefusedError("the peer does not offer cross-memory attach")
        here = host_identity()
        if not here or here != self._blob.host:
            raise _RefusedError(
                "the peer is on another host, or in another process or network namespace: its host identity "
                f"is {self._blob.host or 'unknown'}, here it is {here or 'unknown'}"
            )

    def _read_nonce(self) -> bytes:
        nonce = np.zeros(NONCE_BYTES, np.uint8)
        try:
            read_memory(self._pid, _one(nonce.ctypes.data, NONCE_BYTES), _one(self._blob.nonce_address, NONCE_BYTES))
        except OSError as error:
            raise _RefusedError(_not_permitted("process_vm_readv", self._pid, error)) from error
        if hashlib.sha256(nonce.tobytes()).digest() != self._blob.nonce_digest:
            raise _RefusedError(f"pid {self._pid} holds another nonce than the peer's blob says")
        return nonce.tobytes()

    def _hear(self, packet: Packet) -> None:
        if isinstance(packet, No):
            raise _RefusedError(f"the peer refused: {packet.reason}")
        if isinstance(packet, Probe) and self.state is State.OPENING:
            self._write_probe(packet)
        elif isinstance(packet, Yes) and self.state is State.OPENING:
            self.state = State.READY
        else:
            raise WireError(f"the peer said {type(packet).__name__} out of turn")

    def _write_probe(self, probe: Probe) -> None:
        value = np.frombuffer(probe.value, np.uint8)
        try:
            write_memory(self._pid, _one(value.ctypes.data, len(value)), _one(probe.address, len(value)))
        except OSError as error:
            raise _RefusedError(_not_permitted("process_vm_writev", self._pid, error)) from error
        self._say(Probed())

    def _say(self, packet: Packet) -> None:
        # a target that has hung up already may have said why: the next step reads it, or the end
        with contextlib.suppress(OSError):
            self._socket.send(frames.encode_packet(packet), socket.MSG_NOSIGNAL)

    def _has_ended(self) -> bool:
        if self.state is State.READY:
            ready = [fd for fd, _ in self._ended.poll(0)]
            if self._pidfd in ready:
                self._lose(f"the peer's process (pid {self._pid}) has ended")
            elif ready:
                self.step()
        return self.state is not State.READY

    def _lose(self, why: str) -> None:
        if self.state is State.LOST:
            return
        self.state, self.why = State.LOST, why
        # said also when the handshake is not over: the target may count us as attached already; where it
        # can't be said (never connected, or the target has gone) nobody is left to be told
        with contextlib.suppress(OSError):
            self._socket.send(frames.encode_packet(Bye()), socket.MSG_NOSIGNAL)
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)


def copy_rows(pid: int, batch: Batch) -> tuple[int, OSError | None]:
    """Copy a batch into a process; goes on after short counts until all is copied or a call copies nothing.

    Args:
        pid: the process.
        batch: checked rows.

    Returns:
        Bytes copied, in row order, and the error that ended it early, or None.
    """
    here = Cursor(vectors_of(batch.src, batch.nbytes), batch.total_bytes)
    there = Cursor(vectors_of(batch.dst, batch.nbytes), batch.total_bytes)
    while here.left:
        try:
            count = write_memory(pid, here.window(), there.window())
        except OSError as error:
            return here.done, error
        if not count:
            return here.done, OSError(errno.EIO, "process_vm_writev copied nothing and gave no reason")
        here.advance(count)
        there.advance(count)
    return here.done, None


def _short_copy(batch: Batch, landed: int, error: OSError) -> str:
    if landed == batch.total_bytes:
        return f"{landed} bytes were copied, but {error.strerror}"
    row = row_at(batch.nbytes, landed)
    return (
        f"process_vm_writev stopped with {error_name(error)} ({error.strerror}) in row {row} of {len(batch)} "
        f"({int(batch.nbytes[row])} bytes from {int(batch.src[row]):#x} here to {int(batch.dst[row]):#x} "
        "there): "
        f"{landed} of {batch.total_bytes} bytes are written"
    )


def _not_permitted(call: str, pid: int, error: OSError) -> str:
    advice = "; ptrace rights are missing: same user, Yama, CAP_SYS_PTRACE" if error.errno == errno.EPERM else ""
    return f"{call} on pid {pid} says {error_name(error)}{advice}"


def _one(address: int, nbytes: int) -> U64:
    return np.array([[address, nbytes]], np.uint64)
