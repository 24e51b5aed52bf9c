"""Who may write into this process, and what proves that it can't any more.

A process that has attached by memory can write until it has ended (its pidfd is readable) or has promised
to stop (`Bye`). A TCP connection writes nothing by itself: its receiver, a thread of ours, does, and can be
cut.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvferry.engines.seam import Grants
from kvferry.ids import PeerId

if TYPE_CHECKING:
    from kvferry.engines.local.receiver import Receiver

MAX_RECEIVERS = 256
MAX_MEMORY_WRITERS = 1024


class Writers:
    """Records of attached writers; thread-safe. A fenced peer stays refused while the engine is open."""

    def __init__(self, grants: Grants) -> None:
        self._lock = threading.Lock()
        self.grants = grants
        self._memory: dict[PeerId, int] = {}
        self._receivers: dict[PeerId, list[Receiver]] = {}
        self._no_memory: set[PeerId] = set()
        self._no_tcp: set[PeerId] = set()

    def admit_memory(self, peer: PeerId) -> str:
        """Count a process that is about to be able to write; returns "" or why it is refused."""
        with self._lock:
            if peer in self._no_memory:
                return "a fence was asked for this peer: it can't attach by memory any more"
            if sum(self._memory.values()) >= MAX_MEMORY_WRITERS:
                return f"{MAX_MEMORY_WRITERS} writers are attached by memory, the most that are accepted"
            self._memory[peer] = self._memory.get(peer, 0) + 1
            return ""

    def forget_memory(self, peer: PeerId) -> None:
        """One attachment of this peer is proven to write no more."""
        with self._lock:
            self._memory[peer] -= 1
            if not self._memory[peer]:
                del self._memory[peer]

    def admit_receiver(self, peer: PeerId, receiver: Receiver) -> str:
        """Count a TCP connection; returns "" or why it is refused. It replaces the peer's older ones."""
        with self._lock:
            if peer in self._no_tcp:
                return "a fence was asked for this peer: it can't connect any more"
            if sum(map(len, self._receivers.values())) >= MAX_RECEIVERS:
                return f"{MAX_RECEIVERS} connections are open, the most that are accepted"
            older = self._receivers.setdefault(peer, [])
            receiver.replaces = list(older)
            older.append(receiver)
            return ""

    def forget_receiver(self, peer: PeerId, receiver: Receiver) -> None:
        """A TCP connection's thread has ended."""
        with self._lock:
            self._receivers[peer].remove(receiver)
            if not self._receivers[peer]:
                del self._receivers[peer]

    def receivers(self, peer: PeerId | None = None) -> list[Receiver]:
        """The TCP connections of a peer, or of all."""
        with self._lock:
            groups = list(self._receivers.values()) if peer is None else [self._receivers.get(peer, [])]
            return [receiver for group in groups for receiver in group]

    def fence(self, peer: PeerId, claim: int | None) -> None:
        """Stop what can be stopped here: new attachments, the grant, rows of it that are being received."""
        with self._lock:
            self._no_memory.add(peer)
            if claim is None:
                self._no_tcp.add(peer)
        self.grants.drop(peer, claim)
        for receiver in self.receivers(peer):
            receiver.cut(claim)

    def is_quiet(self, peer: PeerId, claim: int | None) -> bool:
        """Whether, after `fence`, nothing of this peer (of this claim) can land any more."""
        with self._lock:
            if peer in self._memory or (claim is None and peer in self._receivers):
                return False
        return not self.grants.in_use(peer, claim)

    def mechanisms(self) -> dict[str, str]:
        """Which peers can write here, and how; for people."""
        with self._lock:
            by_tcp = {str(peer): "tcp" for peer in self._receivers}
            return by_tcp | {str(peer): "cma" for peer in self._memory}
