"""The connections of a node: each with its handshake, what the peer registered, and what follows from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvferry.errors import Code, Reason
from kvferry.ids import PeerId
from kvferry.layout import Layout, covers
from kvferry.node.links import Dialled, Link
from kvferry.plan import Destinations, Election, Route, route
from kvferry.proto.effects import Source, Where
from kvferry.proto.handshake import Handshake
from kvferry.proto.rules import PeerState
from kvferry.wire import KVArgsRegisterInfo

log = logging.getLogger("kvferry.node")


@dataclass(eq=False)
class Conn:
    """One connection, dialled or accepted."""

    link: Link
    handshake: Handshake
    route: Route | None = None
    fan_in: int = 1
    announced: bool = False
    attaching: bool = False
    speak_at: float = 0.0
    probe_at: float = 0.0
    deadline: float = 0.0
    reason: Reason | None = None

    @property
    def peer(self) -> PeerId | None:
        """The other end, once it has introduced itself."""
        return self.handshake.peer

    @property
    def name(self) -> str:
        """What texts call the other end: side, rank and address as far as they are known, and its identity."""
        theirs = self.handshake.theirs
        where = f"{theirs.side} {theirs.layout.rank} at {theirs.address}" if theirs else self.link.address
        return f"{where} ({self.peer})" if self.peer else where

    @property
    def ready(self) -> bool:
        """Both ends have registered."""
        return self.handshake.state is PeerState.READY

    @property
    def stuck(self) -> str:
        """What a handshake that does not end waits for."""
        if self.peer is None:
            return "nothing was heard: it is no kvferry rank, it hangs, or its engine is still connecting to this one"
        if self.handshake.theirs is None:
            return "it has said who it is, but not what it holds"
        return "this engine is still connecting to the peer's"

    @property
    def theirs(self) -> KVArgsRegisterInfo:
        """What the peer registered; only while ready."""
        assert self.handshake.theirs is not None
        return self.handshake.theirs

    def hear_reason(self, reason: Reason) -> None:
        """A claim was closed; that the group of this rank can't serve the peer is found out there only."""
        if reason.code is Code.INCOMPATIBLE and self.reason is None:
            self.reason = reason
            log.warning("peer %s refused this rank's group: %s", self.link.address, reason)


@dataclass
class Group:
    """How the ranks of a prefill group share out one decode rank; computed once per set of connections.

    Attributes:
        conns: one per prefill rank, the one whose metadata row counts first: the last pipeline stage.
        problem: why the group can't serve this rank; "" if it can.
    """

    conns: list[Conn]
    election: Election
    problem: str = ""

    def sources(self, room: int) -> list[Source]:
        """Who sends what for a room."""
        found = []
        for conn, share in zip(self.conns, self.election.shares(room), strict=True):
            if share.involved or self.problem:
                assert conn.peer is not None
                assert conn.route is not None
                found.append(Source(conn.peer, conn.fan_in, share.sends, conn.route))
        return found


@dataclass
class Conns:
    """All connections by link, peer and dialled address; used by the control thread only."""

    layout: Layout
    group: tuple[Layout, ...]
    by_link: dict[Link, Conn] = field(default_factory=dict)
    by_peer: dict[PeerId, Conn] = field(default_factory=dict)
    by_address: dict[str, Conn] = field(default_factory=dict)
    _destinations: Destinations = field(init=False)
    _groups: dict[tuple[PeerId | None, ...], Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._destinations = Destinations(self.group)

    def add(self, conn: Conn) -> Conn:
        """Keep a new connection."""
        self.by_link[conn.link] = conn
        if isinstance(conn.link, Dialled):
            self.by_address[conn.link.address] = conn
        return conn

    def share(self, address: str, numeric: str) -> bool:
        """Let one more name lead to a connection that stands; say whether there is one."""
        for conn in self.by_link.values():
            if isinstance(conn.link, Dialled) and conn.link.numeric == numeric:
                self.by_address[address] = conn
                return True
        return False

    def older(self, conn: Conn) -> list[Conn]:
        """Connections to the same process that this one replaces; their addresses lead to this one from now on."""
        assert conn.peer is not None
        found = [
            other for other in self.by_link.values()
            if other.peer is not None and other.peer.incarnation == conn.peer.incarnation
            and other.peer.epoch < conn.peer.epoch
        ]  # fmt: skip
        self.by_address = {address: conn if held in found else held for address, held in self.by_address.items()}
        return found

    def remove(self, conn: Conn) -> list[str]:
        """Forget a connection; returns the addresses that led to it."""
        self.by_link.pop(conn.link, None)
        addresses = [address for address, held in self.by_address.items() if held is conn]
        for address in addresses:
            del self.by_address[address]
        if conn.peer is not None and self.by_peer.get(conn.peer) is conn:
            del self.by_peer[conn.peer]
        self._groups.clear()
        return addresses

    def accept(self, conn: Conn, prefill: bool) -> None:
        """The handshake has succeeded: compute what follows from the two layouts, once."""
        assert conn.peer is not None
        self.by_peer[conn.peer] = conn
        if prefill:
            conn.route = route(self.layout, conn.theirs.layout)
        else:
            conn.route = route(conn.theirs.layout, self.layout)
            conn.fan_in = self._destinations.fan_in(conn.theirs.layout)

    def group_of(self, addresses: list[str]) -> Group:
        """The prefill group at these addresses; all of them are ready."""
        conns = list(dict.fromkeys(self.by_address[address] for address in addresses))  # one may have several names
        conns.sort(key=lambda conn: _aux_order(conn.theirs.layout))
        key = tuple(conn.peer for conn in conns)
        if key not in self._groups:
            layouts = [conn.theirs.layout for conn in conns]
            self._groups[key] = Group(conns, Election(self.layout, layouts, self.group), covers(layouts, self.layout))
        return self._groups[key]


def _aux_order(layout: Layout) -> tuple[int, int, int]:
    return -layout.rank.pp, layout.rank.cp, layout.rank.tp


def lost_reason(where: Where, conn: Conn, cause: str) -> Reason:
    """The connection's end, in words."""
    return where.reason(Code.PEER_LOST, cause, peer=conn.name, stage="connection")
