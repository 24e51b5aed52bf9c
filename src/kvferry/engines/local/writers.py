"""Who may write into this process, and what proves that it can't any more.

A process that has attached by memory can write until it has ended (its pidfd is readable) or has promised
to stop (`Bye`). A TCP connection writes nothing by itself: its receiver, in a thread of ours, does, and can
be cut. The connections of one attachment belong together; those of a later attachment replace them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvferry.engines.seam import Grants
from kvferry.ids import PeerId

if TYPE_CHECKING:
    from kvferry.engines.local.receiver import Receiver

MAX_RECEIVERS = 8192
MAX_MEMORY_WRITERS = 1024


class Writers:
    """Records of attached writers; thread-safe. A fenced peer stays refused while the engine is open."""

    def __init__(self, grants: Grants) -> None:
        self._lock = threading.Lock()
        self.grants = grants
        self._memory: dict[PeerId, list[str]] = {}
        self._receivers: dict[PeerId, list[Receiver]] = {}
        self._open = 0
        self._no_memory: set[PeerId] = set()
        self._no_tcp: set[PeerId] = set()

    def admit_memory(self, peer: PeerId, mechanism: str) -> str:
        """Count a process that is about to be able to write; returns "" or why it is refused."""
        with self._lock:
            if peer in self._no_memory:
                return "a fence was asked for this peer: it can't attach by memory any more"
            if sum(map(len, self._memory.values())) >= MAX_MEMORY_WRITERS:
                return f"{MAX_MEMORY_WRITERS} writers are attached by memory, the most that are accepted"
            self._memory.setdefault(peer, []).append(mechanism)
            return ""

    def forget_memory(self, peer: PeerId, mechanism: str) -> None:
        """One attachment of this peer is proven to write no more."""
        with self._lock:
            self._memory[peer].remove(mechanism)
            if not self._memory[peer]:
                del self._memory[peer]

    def admit_receiver(self, receiver: Receiver) -> str:
        """Count a TCP connection; returns "" or why it is refused. The first of an attachment replaces older ones.

        What it replaces is cut, and has ended when `is_alone` says so.
        """
        caller = receiver.caller
        with self._lock:
            if caller.peer in self._no_tcp:
                return "a fence was asked for this peer: it can't connect any more"
            if self._open >= MAX_RECEIVERS:
                return f"{MAX_RECEIVERS} connections are open, the most that are accepted"
            older = list(self._receivers.get(caller.peer, []))
            if caller.number and (not older or older[-1].caller.attachment != caller.attachment):
                # a late one of an attachment that was lost must not replace the attachment that came after it
                return "the attachment that this connection would join is not open here any more"
            if not caller.number and any(other.caller.attachment == caller.attachment for other in older):
                return "this attachment was begun before"
            self._receivers.setdefault(caller.peer, []).append(receiver)
            self._open += 1
        if not caller.number:
            for other in older:
                other.cut(None)
        return ""

    def forget_receiver(self, receiver: Receiver) -> None:
        """A TCP connection has ended: those that belong to it end too, those that waited for it look again."""
        caller = receiver.caller
        with self._lock:
            others = self._receivers[caller.peer]
            others.remove(receiver)
            self._open -= 1
            if not others:
                del self._receivers[caller.peer]
            others = list(others)
        for other in others:
            if other.caller.attachment == caller.attachment:
                other.cut(None)
            else:
                other.look_again()

    def is_alone(self, receiver: Receiver) -> bool:
        """Whether all connections of other attachments of its peer have ended."""
        caller = receiver.caller
        with self._lock:
            others = self._receivers.get(caller.peer, [])
            return all(other.caller.attachment == caller.attachment for other in others)

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
            found: dict[PeerId, set[str]] = {peer: {"tcp"} for peer in self._receivers}
            for peer, used in self._memory.items():
                found.setdefault(peer, set()).update(used)
            return {str(peer): ", ".join(sorted(used)) for peer, used in found.items()}
