"""One rank's share of kvferry: book, sockets, engine and their threads, put together."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvferry.config import Config, port_range
from kvferry.engines import find
from kvferry.engines.grants import GrantTable
from kvferry.engines.seam import Caps, Engine, EngineConfig, Limits, Region
from kvferry.errors import Code, ConfigError, ForkError, Reason
from kvferry.ids import PeerId, Side
from kvferry.layout import Device, Layout, validate, validate_group
from kvferry.node import forks
from kvferry.node.aux import AuxBuffer, AuxRows
from kvferry.node.claims import Claims
from kvferry.node.conns import Conns
from kvferry.node.control import Control
from kvferry.node.digests import Digests
from kvferry.node.footprint import footprint
from kvferry.node.hosts import control_plane, data_plane, tcp_endpoint
from kvferry.node.jobs import Reports
from kvferry.node.links import Links
from kvferry.node.memory_reader import Mapped
from kvferry.node.mover import Mover
from kvferry.node.resolver import Resolver
from kvferry.node.view import RoomView
from kvferry.proto.book import Book
from kvferry.proto.effects import Chunk, Kind, Times, Where
from kvferry.proto.rules import SETTLED
from kvferry.wire import KVArgsRegisterInfo, unpack_pages

log = logging.getLogger("kvferry.node")

HEALTHY_BEAT_S = 5.0
REGISTER_LIMIT_S = 60.0


class Node:
    """A prefill or decode rank.

    Attributes:
        side: which end of hand-offs this is.
        endpoint: "tcp://host:port" of the control plane, as peers reach it.
        incarnation: this process's identity.
    """

    def __init__(
        self, side: Side, layout: Layout, engine: str, config: Config,
        *, group: Sequence[Layout] = (), aux: Sequence[AuxBuffer] = (),
    ) -> None:  # fmt: skip
        """Bind, start the engine and the threads.

        Args:
            side: PREFILL or DECODE.
            layout: what this rank holds, bound to memory.
            engine: name of the transfer engine.
            config: settings.
            group: layouts of all ranks of this side that serve the same requests, this one included; () = only it.
            aux: metadata buffers.

        Raises:
            LayoutError, UnknownEngine, EngineUnavailable, AddressError, ConfigError: what is wrong, and where.
        """
        control, self._data = control_plane(config), data_plane(config)
        validate(layout, side.value, bound=True)
        validate_group(layout, group, side.value)
        self._pid, self._generation = os.getpid(), forks.generation
        self.side = side
        self.is_prefill = side is Side.PREFILL
        self.layout = layout
        self.config = config
        self.engine_name = engine
        self.incarnation = secrets.randbits(62) + 1
        self.where = Where(side.value, str(layout.rank))
        self.aux = AuxRows(aux)
        self.grants = GrantTable()
        self.exposed: set[int] = set()
        self.views: dict[tuple[Kind, int], RoomView] = {}
        self.opening: set[RoomView] = set()
        self.problem = ""
        self.epoch = 0
        self._closed = False
        self.book = Book(_times(config), self.where)
        self.conns = Conns(layout, tuple(group) or (layout,))
        self._open_engine()
        try:
            self.links = Links(
                control.bind, port_range(config.control_ports, "control_ports"),
                config.heartbeat_s, config.heartbeat_timeout_s,
            )  # fmt: skip
        except BaseException:
            self.engine.close()
            raise
        self.endpoint = tcp_endpoint(control.advertised, self.links.port)
        self.resolver = Resolver()
        self.claims = Claims(self)
        self.book.looks_for = self.claims.looks_for
        memory = regions(layout)
        self.mapped = Mapped(memory)
        self.digest = self._digest_of(memory)
        self.digests = Digests(self)
        self.control = Control(self)
        self.mover = Mover(self.engine, self._reports(), config.batches_in_flight, self.is_written_to)
        self.mover.start()
        self.control.thread.start()
        _open.add(self)

    # -- any thread

    def check_fork(self) -> None:
        """Refuse use in a forked child by name."""
        if forks.generation != self._generation:
            raise ForkError(
                f"this {self.side.value} node was made in process {self._pid} and used in its fork {os.getpid()}",
                hint="start worker processes with the spawn method, and make managers after the start",
            )

    def call(self, action: Callable[[], None]) -> None:
        """Have the control thread do something soon; never waits."""
        self.check_fork()
        self.control.call(action)

    def broken(self, problem: str) -> None:
        """A thread died: keep the first cause; rooms fail."""
        self.problem = self.problem or problem
        reason = self.where.reason(Code.INTERNAL, problem, stage="node")
        self.control.call(lambda: self.book.shutdown(time.monotonic(), reason))

    def health(self) -> str:
        """Say which thread does not work, and why; an empty text while all do."""
        if self.problem:
            return self.problem
        if self.control.ended is not None:
            return f"the node has ended: {self.control.ended.cause}"
        if not self.mover.alive:
            return f"the mover thread of engine {self.engine_name} has ended"
        if not self.control.thread.is_alive():
            return "the control thread has ended"
        late = time.monotonic() - self.control.beat
        return f"the control thread did not run for {late:.1f} s" if late > HEALTHY_BEAT_S else ""

    def is_written_to(self) -> bool:
        """Whether a peer may be attaching to this process, or writing to pages of a claim."""
        return bool(self.exposed) or any(not conn.ready for conn in list(self.conns.by_link.values()))

    def register_info(self, epoch: int) -> KVArgsRegisterInfo:
        """What the peer of one connection is told at the handshake."""
        seal: Callable[[bytes, int], bytes] | None = getattr(self.engine, "personal", None)
        blob = self._blob if seal is None or self.problem else seal(self._blob, epoch)
        return KVArgsRegisterInfo(
            layout=self.layout, engines={self.engine_name: blob}, side=self.side.value,
            aux_bytes=self.aux.item_bytes, address=self.endpoint, digest=self.digest,
        )  # fmt: skip

    def open_offer(self, view: RoomView) -> int:
        """Open a sender's room; on the control thread."""
        number = self.book.offer(time.monotonic(), view.room)
        self.views[Kind.OFFER, number] = view
        return number

    def send(self, number: int, chunk: Chunk, aux: bytes, after: Callable[[], bool] | None) -> None:
        """Take a sender's chunk; on the control thread."""
        self.book.send(time.monotonic(), number, chunk, ready=after is None, aux=aux)
        if after is not None:
            self.control.waiting_after.append((number, chunk.number, after))

    def replace_memory(self, layout: Layout, group: tuple[Layout, ...], aux: Sequence[AuxBuffer]) -> None:
        """Register other memory in a new epoch; waits until the engine has it and every peer is told.

        Raises:
            ConfigError: the rank or the spaces changed, or pages of earlier rooms are not free yet.
            EngineError: the engine can't register it; the old registration is gone, new rooms are refused.
        """
        self.check_fork()
        validate(layout, self.side.value, bound=True)
        validate_group(layout, group, self.side.value)
        if (layout.rank, layout.spaces) != (self.layout.rank, self.layout.spaces):
            raise ConfigError(
                f"{self.side.value}: update_buffers can't change rank or spaces "
                f"({self.layout.rank}, {self.layout.spaces} to {layout.rank}, {layout.spaces})",
                hint="make a new manager",
            )
        rows, memory = AuxRows(aux), regions(layout)
        self._wait_until_free()
        reason = self.where.reason(Code.REREGISTERED, "the peer registered other memory", stage="update_buffers")
        self.control.run(lambda: self.control.board.dismiss(reason))

        def register(engine: Engine) -> bytes:
            engine.register(memory)
            return engine.describe()

        blob = self.mover.ask(register, REGISTER_LIMIT_S)

        def switch() -> None:
            self.control.board.dismiss(reason)  # who shook hands in between has heard of the old memory
            self.layout, self.aux, self._blob = layout, rows, blob
            self.mapped, self.digest = Mapped(memory), self._digest_of(memory)
            self.conns = self.control.board.conns = Conns(layout, group or (layout,))
            self.epoch += 1

        self.control.run(switch)

    def release_quarantined(self, room: int) -> None:
        """An operator vouches for a room's pages."""

        def release() -> None:
            for (kind, number), view in list(self.views.items()):
                if view.room == room and not view.released:
                    self.book.operator_release(time.monotonic(), kind, number)

        self.call(release)

    def info(self) -> dict[str, Any]:
        """Engine, addresses, peers and counts, as of now."""
        self.check_fork()
        states = Counter(view.poll.name for view in list(self.views.values()))
        counts = {**dict(self.book.counts), "unspoken": self.links.unspoken}
        return {
            "side": self.side.value, "rank": str(self.layout.rank), "endpoint": self.endpoint,
            "incarnation": f"{self.incarnation:016x}", "epoch": self.epoch, "engine": self.engine_name,
            "caps": [each.name for each in Caps if each in self.engine.caps and each.name],
            "engine_info": self.engine_info(), "peers": [
                {"peer": str(conn.peer), "address": conn.link.address, "ready": conn.ready,
                 "refused": str(conn.reason) if conn.reason else ""}
                for conn in list(self.conns.by_link.values())
            ],
            "rooms": dict(states), "unsettled": self._unsettled(), "grants": len(self.grants), "counts": counts,
            "health": self.health(),
        }  # fmt: skip

    def engine_info(self) -> dict[str, Any]:
        """What the engine says of itself, if it says anything."""
        describe: Callable[[], dict[str, Any]] | None = getattr(self.engine, "info", None)
        try:
            return describe() if describe is not None else {}
        except Exception as error:  # noqa: BLE001 - asked for beside its thread, it may be changing or closed
            return {"unknown": repr(error)}

    def grant(self, peers: tuple[PeerId, ...], claim: int, pages: dict[str, bytes]) -> None:
        """Let peers write to a claim's pages, for engines that check."""
        if Caps.GRANTS in self.engine.caps:
            indices = {space: unpack_pages(data) for space, data in pages.items()}
            starts, ends = footprint(self.layout, indices)
            for peer in peers:
                self.grants.add(peer, claim, starts, ends)

    def close(self, reason: Reason | None = None) -> None:
        """Fail what is live, wait briefly for writes to end, say goodbye, stop all threads. May be called twice."""
        if forks.generation != self._generation or self._closed:
            return
        self._closed = True
        _open.discard(self)
        reason = reason or self.where.reason(Code.SHUTDOWN, "the manager was shut down", stage="shutdown")
        self.control.call(lambda: self.book.shutdown(time.monotonic(), reason))
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and self.control.thread.is_alive() and self._busy():
            time.sleep(0.01)
        self.control.later(lambda: self.control.leave(reason))
        self.control.thread.join(5.0)
        self.mover.close()
        self.digests.close()
        self.resolver.close()

    # -- helpers

    def _digest_of(self, memory: Sequence[Region]) -> str:
        """What the config says, where all memory can be read; else ""."""
        return self.config.digest if all(region.device < 0 for region in memory) else ""

    def _wait_until_free(self) -> None:
        """Wait until no engine and no peer can touch a page any more, at most for drain_limit_s."""
        limit_s = self.config.drain_limit_s
        deadline = time.monotonic() + limit_s
        while unsettled := self._unsettled():
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{self.side.value}: update_buffers while pages of {unsettled} earlier rooms may still be in use "
                    f"({limit_s:g} s after they ended)",
                    hint="wait until is_release_safe() is true for each, or call release_quarantined()",
                )
            time.sleep(0.005)

    def _unsettled(self) -> int:
        book = self.book
        offers, claims = list(book.offers.values()), list(book.claims.values())
        return sum(each.state not in SETTLED for each in offers) + sum(each.state not in SETTLED for each in claims)

    def _busy(self) -> bool:
        """Whether something is still read or written here, or may be, that a little time can end."""
        return bool(self.control.calls) or self._unsettled() > 0

    def _open_engine(self) -> None:
        self.engine = find.load(self.engine_name)
        config = self.config
        self.engine.open(EngineConfig(
            me=PeerId(self.incarnation), grants=self.grants, bind_host=self._data.bind,
            advertise_host=self._data.advertised, data_ports=port_range(config.data_ports, "data_ports"),
            options=config.options(),
        ))  # fmt: skip
        try:
            self.engine.register(regions(self.layout))
            self._blob = self.engine.describe()
        except BaseException:
            self.engine.close()
            raise
        own = self.engine.limits
        self.limits = Limits(min(own.rows, config.batch_rows), min(own.bytes, config.batch_bytes))

    def _reports(self) -> Reports:
        book, post = self.book, self.control.call
        now = time.monotonic
        return Reports(
            progress=lambda job: post(lambda: book.job_progress(now(), job)),
            landed=lambda job, nbytes: post(lambda: book.job_landed(now(), job, nbytes)),
            failed=lambda job, cause, quiet: post(lambda: book.job_failed(now(), job, cause, quiet=quiet)),
            quiet=lambda job: post(lambda: book.job_quiet(now(), job)),
            attached=lambda peer, cause: self.control.later(lambda: self.control.board.attached(peer, cause)),
            fenced=lambda peer, claim: post(lambda: book.fence_done(now(), peer, claim)),
            broken=self.broken,
        )


_open: weakref.WeakSet[Node] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Peers hear of the end at once; and a thread that is inside of an engine's library then would make it an abort."""
    for node in list(_open):
        try:
            node.close()
        except Exception:
            log.exception("a node could not be closed at the interpreter's end")


def regions(layout: Layout) -> list[Region]:
    """The memory of a layout, merged where tensors share or touch."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for tensor in layout.tensors:
        device = tensor.memory.index if isinstance(tensor.memory, Device) else -1
        spans.setdefault(device, []).append((tensor.address, tensor.address + tensor.nbytes))
    found = []
    for device, pairs in spans.items():
        starts, ends = (np.array(column, np.uint64) for column in zip(*sorted(pairs), strict=True))
        reach = np.maximum.accumulate(ends)
        first = np.flatnonzero(np.append(True, starts[1:] > reach[:-1]))
        last = np.append(first[1:], len(starts)) - 1
        found += [Region(int(starts[a]), int(reach[b] - starts[a]), device) for a, b in zip(first, last, strict=True)]
    return found


def _times(config: Config) -> Times:
    return Times(
        config.tick_s, config.heartbeat_s, config.bootstrap_timeout_s, config.claim_timeout_s, config.stall_s,
        config.drain_limit_s, config.hold_limit_s,
    )  # fmt: skip
