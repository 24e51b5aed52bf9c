"""The writer's end of the Unix socket: who the target is, the handshake, and what is common to writing its memory."""

from __future__ import annotations

import contextlib
import os
import select
import socket

from kvferry.engines.host import host_identity
from kvferry.engines.local import frames
from kvferry.engines.local.blob import Blob
from kvferry.engines.local.frames import Bye, Knock, No, Packet, Probe, Probed, Yes
from kvferry.engines.local.link import State
from kvferry.engines.local.syscalls import error_name, peer_credentials, peer_pidfd
from kvferry.engines.seam import Batch, Done, Outcome, Ticket
from kvferry.errors import WireError
from kvferry.ids import PeerId


class RefusedError(Exception):
    """The mechanism can't be used with this peer; the text says why."""


class UnixLink:
    """Writes the target's memory itself; `submit` returns when the copy has ended.

    The target's pid is the kernel's word for who listens on its socket. Its pidfd is looked at before and after
    each copy: what was written to a process that has ended has not landed.

    A subclass says how it proves that it holds the blob, how it writes the probe, and how it copies.
    """

    mechanism = ""

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
        except RefusedError as refusal:
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
            raw, fds, flags, _ = socket.recv_fds(
                self._socket, frames.MAX_PACKET_BYTES, frames.MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            raw, fds, flags = b"", [], 0
        try:
            self._hear(raw, fds, flags)
        except (RefusedError, WireError) as error:
            self._lose(str(error))
        finally:
            for fd in fds:
                os.close(fd)

    def submit(self, ticket: Ticket, batch: Batch) -> None:
        """Copy a batch now; the outcome is in `done`."""
        if self._has_ended():
            self.done.append(Done(ticket, Outcome.FAILED_QUIET, self.why, "ESRCH"))
            return
        cause, native = self._copy(batch)
        if not cause and self._has_ended():
            cause, native = f"{batch.total_bytes} bytes were copied, but meanwhile {self.why}", "ESRCH"
        if cause:
            self.done.append(Done(ticket, Outcome.FAILED_QUIET, cause, native))
        else:
            self.done.append(Done(ticket, Outcome.LANDED))

    def close(self) -> None:
        """Promise the target that nothing more is written, and close."""
        self._lose("detached")

    # what a mechanism says for itself

    def _why_not_offered(self) -> str:
        """Why the blob does not offer this mechanism, or ""."""
        raise NotImplementedError

    def _nonce(self) -> bytes:
        """What the proof is made with besides the blob's token; raises RefusedError."""
        raise NotImplementedError

    def _write_probe(self, probe: Probe, fds: list[int]) -> None:
        """Write the value where the target says; raises RefusedError."""
        raise NotImplementedError

    def _told(self, packet: Packet, fds: list[int]) -> None:  # noqa: ARG002 - for those that are sent some
        """Something else that the target says while this opens; raises RefusedError or WireError."""
        raise WireError(f"the peer said {type(packet).__name__} out of turn")

    def _copy(self, batch: Batch) -> tuple[str, str]:
        """Copy checked rows; returns why it failed and the native code, or "" and ""."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Free what the mechanism holds; nothing is written after this."""

    # what they have in common

    def _knock(self) -> None:
        self._check_host()
        try:
            self._socket.connect(f"\0{self._blob.unix}")
        except OSError as error:
            raise RefusedError(f"the peer's Unix socket can't be reached ({error_name(error)})") from error
        pid, uid = peer_credentials(self._socket)
        if uid != os.geteuid():
            raise RefusedError(f"the peer (pid {pid}) runs as user {uid}, this process as {os.geteuid()}")
        try:
            self._pidfd = peer_pidfd(self._socket, pid)
        except OSError as error:
            raise RefusedError(f"no pidfd for the peer (pid {pid}, {error_name(error)})") from error
        self._pid = pid
        self._ended.register(self._pidfd, select.POLLIN)
        self._ended.register(self._socket.fileno(), select.POLLIN)
        proof = frames.knock_proof(self._blob.token, self._nonce(), self._me, self.mechanism)
        self._say(Knock(self._me, proof, self.mechanism))

    def _check_host(self) -> None:
        refusal = self._why_not_offered()
        if refusal:
            raise RefusedError(refusal)
        here = host_identity()
        if not here or here != self._blob.host:
            raise RefusedError(
                "the peer is on another host, or in another process or network namespace: its host identity "
                f"is {self._blob.host or 'unknown'}, here it is {here or 'unknown'}"
            )

    def _hear(self, raw: bytes, fds: list[int], flags: int) -> None:
        if not raw:
            raise RefusedError("the peer has closed the attachment or has ended")
        if flags & socket.MSG_CTRUNC:
            raise RefusedError(frames.NO_DESCRIPTORS)
        packet = frames.decode_packet(raw)
        if isinstance(packet, No):
            raise RefusedError(f"the peer refused: {packet.reason}")
        if self.state is not State.OPENING:
            raise WireError(f"the peer said {type(packet).__name__} out of turn")
        if isinstance(packet, Probe):
            self._write_probe(packet, fds)
            self._say(Probed())
        elif isinstance(packet, Yes):
            self._admitted()
            self.state = State.READY
        else:
            self._told(packet, fds)

    def _admitted(self) -> None:
        """The target has said yes; raises RefusedError."""

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
        self._let_go()
        # said also when the handshake is not over: the target may count us as attached already; where it
        # can't be said (never connected, or the target has gone) nobody is left to be told
        with contextlib.suppress(OSError):
            self._socket.send(frames.encode_packet(Bye()), socket.MSG_NOSIGNAL)
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
