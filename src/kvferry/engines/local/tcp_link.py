"""The writer's end of an attachment by TCP: one connection at first, more when there is much to send."""

from __future__ import annotations

import logging
import secrets
import select
from collections.abc import Callable

from kvferry.engines.local import frames
from kvferry.engines.local.blob import Blob
from kvferry.engines.local.dial import Dial
from kvferry.engines.local.lanes import Lanes
from kvferry.engines.local.link import State
from kvferry.engines.local.resolve import Resolution
from kvferry.engines.local.tcp_connection import TcpConnection
from kvferry.engines.seam import Batch, Done, Ticket
from kvferry.ids import PeerId

_logger = logging.getLogger(__name__)

STEP_BYTES = 4 << 20
"""About the most that one `step` sends, so that one peer can't keep the mover from the others."""

MUCH_BYTES = 4 << 20
"""Payload that is on its way by each connection when another one is opened."""


class TcpLink:
    """Spreads whole batches over its connections; each ticket belongs to one of them.

    The connections stand and fall together: when one is lost, all tickets end and the peer must be attached anew.
    One that could not join the others is done without.
    """

    mechanism = "tcp"

    def __init__(
        self, blob: Blob, me: PeerId, on_resolved: Callable[[], None], most_connections: int, lanes: Lanes
    ) -> None:
        self.state = State.OPENING
        self.why = ""
        self.done: list[Done] = []
        self._token = blob.token
        self._me = me
        self._attachment = secrets.token_bytes(frames.ATTACHMENT_BYTES)
        self._where = f"{blob.tcp_host} port {blob.tcp_port}"
        self._most = most_connections
        self._lanes = lanes
        self._connections: list[TcpConnection] = []
        self._epoll: select.epoll | None = None
        self._watched: dict[int, int] = {}
        if not 0 <= me.epoch < 1 << 64:
            self._lose(f"the peer has epoch {me.epoch}, which is no unsigned 64-bit number")
        elif blob.tcp_port:
            self._open(Dial(self._where, Resolution(blob.tcp_host, blob.tcp_port, on_resolved), []))
        else:
            self._lose("the peer does not offer TCP")

    def fileno(self) -> int:
        """The only connection's socket, or an epoll descriptor for several; -1 while there is none."""
        if self._epoll is not None:
            return self._epoll.fileno()
        return self._connections[0].fileno() if self._connections else -1

    def wants_write(self) -> bool:
        """While there is something to send; several connections are waited for behind the epoll descriptor."""
        return self._epoll is None and any(connection.wants_write() for connection in self._connections)

    def step(self) -> None:
        """Connect, send, read replies: whatever can be done now."""
        for connection in list(self._connections):
            if self.state is not State.LOST:
                self._step(connection)
        self._watch()

    def submit(self, ticket: Ticket, batch: Batch) -> None:
        """Queue a batch and send what the socket takes."""
        chosen = self._choose()
        chosen.submit(ticket, batch)
        self._step(chosen)
        self._watch()

    def close(self) -> None:
        """Close the connections; open tickets end."""
        self._lose("detached")

    def _choose(self) -> TcpConnection:
        """The first connection while little is on its way by it, or else the one by which least is."""
        # small batches by several connections would wake several threads of the target for nothing
        if self._connections[0].unanswered < MUCH_BYTES:
            return self._connections[0]
        ready = [connection for connection in self._connections if connection.state is State.READY]
        chosen = min(ready, key=lambda connection: connection.unanswered)
        if chosen.unanswered >= MUCH_BYTES and len(ready) == len(self._connections) < self._most:
            self._join(chosen)
        return chosen

    def _join(self, one: TcpConnection) -> None:
        """Open another connection to where this one leads."""
        try:
            address = one.address()
            # from now on there is enough to send to keep a thread busy for each connection
            one.give_to(self._lanes.lane(one.number))
            lane = self._lanes.lane(len(self._connections))
            if self._epoll is None:
                self._epoll = select.epoll()
        except OSError as error:  # no descriptor is left; or this one is lost, which the next step finds
            self._do_without(str(error))
            return
        another = self._open(Dial(self._where, None, [address]))
        another.give_to(lane)
        self._step(another)

    def _open(self, dial: Dial) -> TcpConnection:
        caller = frames.Caller(self._me, self._attachment, len(self._connections))
        connection = TcpConnection(self._token, caller, dial)
        self._connections.append(connection)
        return connection

    def _step(self, connection: TcpConnection) -> None:
        was_opening = connection.state is State.OPENING
        connection.step(STEP_BYTES // len(self._connections))
        self.done += connection.done
        connection.done.clear()
        if connection.state is State.LOST and connection.number and was_opening:
            self._connections.remove(connection)
            self._do_without(connection.why)
        elif connection.state is State.LOST:
            self._lose(connection.why)
        elif not connection.number and self.state is State.OPENING:
            self.state = connection.state

    def _do_without(self, why: str) -> None:
        self._most = len(self._connections)
        _logger.warning("local engine: %s: no more than %d connections, because %s", self._where, self._most, why)

    def _lose(self, why: str) -> None:
        if self.state is State.LOST:
            return
        self.state, self.why = State.LOST, why
        for connection in self._connections:
            connection.lose(why)
            self.done += connection.done
            connection.done.clear()
        self._connections.clear()
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None

    def _watch(self) -> None:
        """Tell the epoll descriptor what each connection waits for."""
        if self._epoll is None:
            return
        watched: dict[int, int] = {}
        for connection in self._connections:
            fd = connection.fileno()
            if fd < 0:
                continue
            watched[fd] = select.EPOLLIN | (select.EPOLLOUT if connection.wants_write() else 0)
            if fd not in self._watched:
                self._epoll.register(fd, watched[fd])
            elif watched[fd] != self._watched[fd]:
                self._epoll.modify(fd, watched[fd])
        self._watched = watched
