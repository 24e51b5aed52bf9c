"""Decode side: from a room to its sources: look up, dial, shake hands, elect. Runs on the control thread.

Look-ups and reachability checks take place on the resolver's threads; what they find comes back as calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import BootstrapError, Code, KvferryError, Reason
from kvferry.ids import PeerId
from kvferry.node.conns import Conn
from kvferry.node.links import Dialled
from kvferry.node.view import RoomView
from kvferry.proto.claim import Claim
from kvferry.proto.effects import ClaimFacts, Kind
from kvferry.proto.handshake import Handshake
from kvferry.proto.rules import DRAINS, PeerState

if TYPE_CHECKING:
    from kvferry.node.node import Node

REDIAL_S = 2.0
"""How often a process is dialled whose earlier connection left pages without a proof."""


_SHOWN = 3
"""Of so many ranks that are missing it is said what they wait for."""


@dataclass(frozen=True)
class Target:
    """Where a room's sources are.

    Attributes:
        find: returns their addresses; called on a resolver thread, unless they are given.
        key: equal keys are looked up once while all their connections stand; None is looked up for every room.
        addresses: the sources, where they are known.
    """

    find: Callable[[], list[str]] = list
    key: object = None
    addresses: tuple[str, ...] = ()


class Claims:
    """Claims on their way to their sources."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.aux_slots: dict[int, int] = {}
        self._pending: dict[int, list[str] | None] = {}
        self._known: dict[object, list[str]] = {}
        self._looking: dict[object, list[int]] = {}
        self._dialling: set[str] = set()
        self._lost: dict[PeerId, str] = {}
        self._redial_at = 0.0
        self._epoch = 0

    def open(self, view: RoomView, tag: int, target: Target, trace: str) -> int:
        """Open a claim and begin to find its sources; returns its number."""
        number = self.node.book.claim(time.monotonic(), view.room, tag=tag, trace=trace)
        self.node.views[Kind.CLAIM, number] = view
        self._pending[number] = None
        known = list(target.addresses) or self._known.get(target.key)
        if known is not None:
            self._found(number, known)
        else:
            self._look_up(number, target)
        return number

    def metadata(self, number: int, facts: ClaimFacts, aux_slot: int) -> None:
        """The claim's pages and its aux slot are known."""
        self.aux_slots[number] = aux_slot
        self.node.book.metadata(time.monotonic(), number, facts)

    def write_aux(self, number: int, aux: bytes) -> None:
        """Put a metadata row into the claim's slot."""
        slot = self.aux_slots.get(number)
        if slot is not None and slot >= 0:
            self.node.aux.write(slot, aux)

    def look(self) -> None:
        """A connection became ready or was refused: see which claims can go on."""
        for number in list(self._pending):
            self._consider(number)

    def looks_for(self, number: int) -> str:
        """What a claim waits for whose sources were not reached, in words."""
        addresses = self._pending.get(number)
        if addresses is None:
            return "their addresses are still being looked up"
        conns = {address: self.node.conns.by_address.get(address) for address in addresses}
        missing = [(address, conn) for address, conn in conns.items() if conn is None or not conn.announced]
        first = "; ".join(
            f"{address}: {conn.stuck if conn else 'still being connected to'}" for address, conn in missing[:_SHOWN]
        )
        return f"{len(missing)} of {len(conns)} are missing; {first}" + ("; ..." if missing[_SHOWN:] else "")

    def connection_ended(self, conn: Conn, addresses: list[str]) -> None:
        """Fail what waited for these addresses; remember where they led while pages wait for a proof."""
        if not isinstance(conn.link, Dialled):
            return
        if conn.peer is not None:
            self._lost[conn.peer] = conn.link.address
        reason = conn.reason
        for address in addresses:
            if not conn.announced and reason is not None and reason.code is Code.PEER_LOST:
                cause = f"{reason.cause}; {conn.stuck}"
                reason = self.node.where.reason(Code.UNREACHABLE, cause, peer=address, stage="handshake")
            self._gone(address, reason)

    def tick(self, now: float) -> None:
        """Drop what is over; dial again where pages wait for a proof that only the other process can give."""
        book = self.node.book
        self.aux_slots = {number: slot for number, slot in self.aux_slots.items() if number in book.claims}
        self._lost = {peer: address for peer, address in self._lost.items() if peer in book.peers}
        if now < self._redial_at or self.node.is_prefill:
            return
        self._redial_at = now + REDIAL_S
        for peer, address in self._lost.items():
            record = book.peers[peer]
            waiting = any(book.claims[number].state in DRAINS for number in record.claims)
            if record.state is PeerState.LOST and waiting:
                self._dial(address)

    # -- helpers

    def _post(self, action: Callable[..., None], *args: object) -> None:
        self.node.control.later(lambda: action(*args))

    def _look_up(self, number: int, target: Target) -> None:
        """Rooms that ask the same at the same time share one look-up."""
        key = object() if target.key is None else target.key
        waiting = self._looking.setdefault(key, [])
        waiting.append(number)
        if len(waiting) == 1:
            self.node.resolver.run(
                lambda: self._find(target, waiting), lambda found: self._post(self._looked_up, key, target, found)
            )

    def _waits(self, number: int) -> bool:
        claim = self.node.book.claims.get(number)
        return claim is not None and claim.looking

    def _find(self, target: Target, waiting: list[int]) -> list[str] | None:
        """Look up, on a thread of the resolver's; None where all who wanted it have ended meanwhile."""
        return target.find() if any(map(self._waits, list(waiting))) else None

    def _looked_up(self, key: object, target: Target, found: list[str] | KvferryError | None) -> None:
        for number in self._looking.pop(key):
            if found is None:
                if self._waits(number):  # it came when the others had ended
                    self._look_up(number, target)
                else:
                    self._pending.pop(number, None)
                continue
            if isinstance(found, KvferryError):
                code = Code.NO_BOOTSTRAP if isinstance(found, BootstrapError) else Code.UNREACHABLE
                self._fail(number, self.node.where.reason(code, str(found), stage="look-up of the prefill side"))
                continue
            if target.key is not None:
                self._known[target.key] = found
            self._found(number, found)

    def _found(self, number: int, found: list[str]) -> None:
        if number not in self._pending:
            return
        self._pending[number] = found
        for address in found:
            self._dial(address)
        self._consider(number)

    def _dial(self, address: str) -> None:
        if address in self._dialling or address in self.node.conns.by_address:
            return
        self._dialling.add(address)
        self.node.resolver.reach(address, lambda result: self._post(self._reached, address, result))

    def _reached(self, address: str, result: str | KvferryError) -> None:
        self._dialling.discard(address)
        if isinstance(result, str):
            if self.node.conns.share(address, result):  # another name of a process that is connected already
                self.look()
                return
            try:
                self._connect(address, result)
            except KvferryError as error:
                result = error
        if isinstance(result, KvferryError):
            cause = str(result)
            self._gone(address, self.node.where.reason(Code.UNREACHABLE, cause, peer=address, stage="connection"))

    def _connect(self, address: str, numeric: str) -> None:
        self._epoch += 1
        node = self.node
        handshake = Handshake(node.incarnation, node.register_info(self._epoch), node.where, self._epoch)
        routing_id = node.incarnation.to_bytes(8, "big") + self._epoch.to_bytes(4, "big")
        conn = Conn(node.links.dial(address, numeric, routing_id), handshake)
        # a tick before the rooms that wait for it run out of time: it can say where it got stuck
        conn.deadline = time.monotonic() + node.config.bootstrap_timeout_s - node.config.tick_s
        node.control.board.speak(node.conns.add(conn), repeat=False)

    def _gone(self, address: str, reason: Reason | None) -> None:
        """An address leads nowhere: what waits for it fails, and where it came from is asked again."""
        self._known = {key: known for key, known in self._known.items() if address not in known}
        for number, addresses in list(self._pending.items()):
            if addresses is not None and address in addresses and reason is not None:
                self._fail(number, reason)

    def _consider(self, number: int) -> None:
        claim = self.node.book.claims.get(number)
        if claim is None or not claim.looking:
            self._pending.pop(number, None)
            return
        addresses = self._pending.get(number)
        if addresses is None:
            return
        conns = [self.node.conns.by_address.get(address) for address in addresses]
        refused = next((conn for conn in conns if conn is not None and conn.reason is not None), None)
        if refused is not None:
            assert refused.reason is not None
            self._fail(number, refused.reason)
        elif all(conn is not None and conn.announced for conn in conns):
            self._resolve(claim, addresses)

    def _resolve(self, claim: Claim, addresses: list[str]) -> None:
        del self._pending[claim.id]
        group = self.node.conns.group_of(addresses)
        if group.problem:
            # only this end sees the whole group: to open the room, without its pages, and to close it tells the others
            claim.facts = None
        self.node.book.resolved(time.monotonic(), claim.id, group.sources(claim.room))
        if group.problem:
            self._fail(claim.id, self.node.where.reason(Code.INCOMPATIBLE, group.problem, stage="handshake"))

    def _fail(self, number: int, reason: Reason) -> None:
        self._pending.pop(number, None)
        self.node.book.unresolved(time.monotonic(), number, reason)
