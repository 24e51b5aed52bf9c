"""The target's Unix socket: lets processes of the same user write to its memory, and watches for their end.

Who it is (pid, uid) the kernel says, never a message. For cross-memory attach, that it can reach this very address
space is shown by the nonce it has read; for shared memory its proof is the blob's token. That it can write is shown
by a value found in a scratch word.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvferry.engines.local import frames
from kvferry.engines.local.frames import Bye, Knock, No, Packet, Probe, Probed, Yes
from kvferry.engines.local.loop import Loop
from kvferry.engines.local.probe import PROBE_BYTES, SharedProbePage, Slots, probe_page
from kvferry.engines.local.shares import Shares
from kvferry.engines.local.syscalls import error_name, peer_credentials, peer_pidfd
from kvferry.engines.local.tcp_door import MAX_GUESTS, accept, send_and_forget
from kvferry.engines.local.writers import Writers
from kvferry.errors import PoolError, WireError
from kvferry.ids import PeerId

HANDSHAKE_S = 5.0
_BACKLOG = 128


@dataclass(eq=False)
class _Guest:
    connection: socket.socket
    until: float
    peer: PeerId | None = None
    mechanism: str = ""
    pidfd: int = -1
    page: Slots | None = None
    slot: int = 0
    value: bytes = b""
    attached: bool = False


class MemoryDoor:
    """Runs in the loop's thread. An attached process is forgotten on `Bye` or when its pidfd is readable.

    Attributes:
        name: of the abstract socket, without its NUL byte.
        offers: the mechanisms that are let in: "cma", "shm".
        garbage: connections that were turned away because what they said made no sense.
    """

    def __init__(
        self,
        loop: Loop,
        token: bytes,
        writers: Writers,
        shares: Shares,
        offers: Collection[str],
        on_change: Callable[[], None],
    ) -> None:
        self._loop = loop
        self.offers = offers
        self._shares = shares
        self._shared_page: SharedProbePage | None = None
        self._token = token
        self._writers = writers
        self._on_change = on_change
        self._page = probe_page()  # made by the thread that opens the engine
        self._guests: set[_Guest] = set()
        self.garbage = 0
        self.name = f"kvferry-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), self._accept)
        loop.sweep(self._sweep)

    def half_close(self, peer: PeerId) -> None:
        """Tell a peer's writer to stop; its `Bye` is still heard."""
        for guest in self._guests:
            if guest.peer == peer and guest.connection.fileno() >= 0:
                _half_close(guest.connection)

    def close(self) -> None:
        """Close what is open; only when the loop has stopped."""
        for guest in self._guests:
            guest.connection.close()
            if guest.pidfd >= 0:
                os.close(guest.pidfd)
        self._guests.clear()
        self._listener.close()
        if self._shared_page is not None:
            self._shared_page.close()

    def _accept(self) -> None:
        connection = accept(self._listener, self._loop)
        if connection is None:
            return
        connection.setblocking(False)
        attaching = [guest for guest in self._guests if not guest.attached]
        if len(attaching) >= MAX_GUESTS:
            self._hang_up(min(attaching, key=lambda guest: guest.until))
        guest = _Guest(connection, time.monotonic() + HANDSHAKE_S)
        self._guests.add(guest)
        self._loop.watch(connection.fileno(), lambda: self._hear(guest))

    def _hear(self, guest: _Guest) -> None:
        try:
            raw = guest.connection.recv(frames.MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        if not raw:
            self._hang_up(guest)
            return
        try:
            reason = self._answer(guest, frames.decode_packet(raw))
        except WireError:
            self.garbage += 1
            self._hang_up(guest)
            return
        if reason:
            send_and_forget(guest.connection, frames.encode_packet(No(reason)))
            self._hang_up(guest)

    def _answer(self, guest: _Guest, packet: Packet) -> str:
        """Take one step; returns why the peer is refused, or ""."""
        if isinstance(packet, Knock) and guest.peer is None:
            return self._knocked(guest, packet)
        if isinstance(packet, Probed) and guest.peer is not None and not guest.attached:
            return self._probed(guest)
        if isinstance(packet, Bye):
            guest.attached = False
            self._hang_up(guest)
            return ""
        if isinstance(packet, No) and not guest.attached:
            self._hang_up(guest)
            return ""
        raise WireError(f"{type(packet).__name__} is out of turn")

    def _knocked(self, guest: _Guest, knock: Knock) -> str:
        pid, uid = peer_credentials(guest.connection)
        if uid != os.geteuid():
            return f"the writer (pid {pid}) runs as user {uid}, the target as user {os.geteuid()}"
        refusal = self._why_not(knock)
        if refusal:
            return refusal
        try:
            guest.pidfd = peer_pidfd(guest.connection, pid)
        except OSError as error:
            return f"no pidfd for the writer ({error_name(error)}): its end could never be proven"
        # from here on it could write: counted before it is told where its probe goes
        refusal = self._writers.admit_memory(knock.peer, knock.mechanism)
        if refusal:
            return refusal
        guest.peer, guest.mechanism = knock.peer, knock.mechanism
        self._loop.watch(guest.pidfd, lambda: self._gone(guest))
        return self._send_probe(guest)

    def _why_not(self, knock: Knock) -> str:
        if knock.mechanism not in self.offers:
            return f"this process does not offer {knock.mechanism[:20]!r}"
        by_memory = knock.mechanism == "cma"
        key, nonce = frames.key_of(self._token, knock.peer.epoch), self._page.nonce if by_memory else b""
        proof = frames.knock_proof(key, nonce, knock.peer, knock.mechanism)
        if not hmac.compare_digest(knock.proof, proof):
            self.garbage += 1
            return "the proof is wrong: the nonce was not read from this process, or the blob is an old one"
        return "" if by_memory else self._shares.why_not

    def _send_probe(self, guest: _Guest) -> str:
        try:
            guest.page = self._page if guest.mechanism == "cma" else self._shared()
        except PoolError as error:
            return f"no page for a probe: {error}"
        guest.slot, guest.value = guest.page.new_slot(), secrets.token_bytes(PROBE_BYTES)
        raw = frames.encode_packet(Probe(guest.slot, guest.value))
        if not isinstance(guest.page, SharedProbePage):
            send_and_forget(guest.connection, raw)
            return ""
        try:
            socket.send_fds(guest.connection, [raw], [guest.page.fd], socket.MSG_NOSIGNAL)
        except OSError as error:
            return f"the descriptor of the probe page can't be sent: {error_name(error)}"
        return ""

    def _shared(self) -> SharedProbePage:
        if self._shared_page is None:
            self._shared_page = SharedProbePage()
        return self._shared_page

    def _probed(self, guest: _Guest) -> str:
        if guest.page is None or guest.page.read_slot(guest.slot) != guest.value:
            return "the probe that the writer wrote did not arrive in this process's memory"
        refusal = self._shares.send(guest.connection) if guest.mechanism == "shm" else ""
        if refusal:
            return refusal
        guest.attached = True
        send_and_forget(guest.connection, frames.encode_packet(Yes()))
        return ""

    def _gone(self, guest: _Guest) -> None:
        guest.attached = False
        self._hang_up(guest)

    def _hang_up(self, guest: _Guest) -> None:
        """Close the connection; a process that may still write stays on record until it has ended."""
        if guest.connection.fileno() >= 0:
            self._loop.unwatch(guest.connection.fileno())
            guest.connection.close()
        if guest.attached:
            return
        self._guests.discard(guest)
        if guest.pidfd >= 0:
            self._loop.unwatch(guest.pidfd)
            os.close(guest.pidfd)
        if guest.peer is not None:
            self._writers.forget_memory(guest.peer, guest.mechanism)
            self._on_change()

    def _sweep(self) -> bool:
        attaching = [guest for guest in self._guests if not guest.attached]
        now = time.monotonic()
        for guest in attaching:
            if guest.until < now:
                self._hang_up(guest)
        return bool(attaching)


def _half_close(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return
