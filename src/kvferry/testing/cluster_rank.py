"""One rank of a test cluster: a manager over memory with guards, and what each request must leave in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.api import KVArgs, KVClassType, KVManager, KVReceiver, KVSender, get_kv_class
from kvferry.api.room import Room
from kvferry.ids import KVPoll, Side
from kvferry.layout import Layout
from kvferry.plan import PageList
from kvferry.testing.oracle import Cells, Key, Memory, cells, pages_of
from kvferry.testing.suite_memory import PLAIN

Pages = npt.NDArray[np.int32] | npt.NDArray[np.int64]

MAIN = "kv"
AUX_ROWS = 64
SETTINGS: dict[str, Any] = {
    "bootstrap_timeout_s": 10.0, "claim_timeout_s": 10.0, "stall_s": 10.0, "drain_limit_s": 2.0,
}  # fmt: skip
"""Shorter than the defaults: a test should not wait half a minute for what has gone wrong."""


class HandOff(msgspec.Struct, frozen=True):
    """One request, as both sides are told of it.

    Attributes:
        room: the room number, also the request's tag.
        num_tokens: tokens of the request.
        prefix: tokens that decode has already.
        first_token: where prefill's lists begin; at most `prefix`.
        chunk_pages: pages of one chunk of the main space.
        rows: rows of each space that has coverage Rows.
    """

    room: int
    num_tokens: int
    prefix: int = 0
    first_token: int = 0
    chunk_pages: int = 1000
    rows: int = 0


@dataclass
class _Open:
    """A request at this rank: its room, its pages, its elements, and the chunks that were not sent yet."""

    room: Room
    lists: dict[str, PageList]
    where: Cells
    chunks: list[Pages]
    states: dict[str, Pages]


class ClusterRank:
    """A prefill or decode rank in this process.

    Attributes:
        manager: kvferry's manager.
        memory: what is registered, pattern-filled, with guards on both sides.
        aux: int64[64, 2]: metadata rows; a room's is that of its number modulo 64.
    """

    def __init__(
        self, side: str, layout: Layout, group: Sequence[Layout], others: Sequence[Layout], engine: str,
        settings: dict[str, Any], memory: str = PLAIN,
    ) -> None:  # fmt: skip
        """Allocate memory and start a manager.

        Args:
            side: "prefill" or "decode".
            layout: what the rank holds, not bound.
            group: layouts of all ranks of its side that serve the same requests; () is this one alone.
            others: layouts of the other side's ranks.
            engine: the transfer engine.
            settings: of the manager, by name.
            memory: where its memory comes from, "module:function" (see `suite_memory`).
        """
        self.side, self._others = Side(side), others
        self.memory, self.aux = Memory(layout, provider=memory), np.zeros((AUX_ROWS, 2), np.int64)
        manager = get_kv_class(engine, KVClassType.MANAGER)
        args = KVArgs(self.memory.layout, (), [self.aux], group)
        self.manager: KVManager = manager(args, side, environ={}, **{**SETTINGS, **settings})
        self._pages = {space.name: _pages_of_space(layout, space.name) for space in layout.spaces}
        self._free = {name: np.random.default_rng(n).permutation(n).tolist() for name, n in self._pages.items()}
        self._open: dict[int, _Open] = {}
        self._last: Cells = {}

    @property
    def layout(self) -> Layout:
        """What it holds, bound to its memory."""
        return self.memory.layout

    @property
    def endpoint(self) -> str:
        """Its control plane, "tcp://host:port"."""
        return self.manager.endpoint

    # -- requests

    def begin(self, request: HandOff, endpoints: Sequence[str] = (), *, sends: bool = True) -> None:
        """Open the room and name its pages; prefill fills them, and sends them if `sends`."""
        first = request.first_token if self.side is Side.PREFILL else request.prefix
        lists = self._take(first, request)
        where = self._last = cells(self.layout, lists, first, request.num_tokens, request.rows)
        main = lists.get(MAIN, PageList(np.zeros(0, np.int32))).indices
        states = {name: given.indices for name, given in lists.items() if name != MAIN}
        if self.side is Side.PREFILL:
            self._open[request.room] = self._offer(request, lists, where, main, states)
            if sends:
                self.send(request.room)
        else:
            self._open[request.room] = self._claim(request, lists, where, main, states, endpoints)

    def send(self, room: int, chunks: int | None = None) -> None:
        """Prefill: send so many further chunks; None: all that are left."""
        found = self._open[room]
        assert isinstance(found.room, KVSender)
        for _ in range(len(found.chunks) if chunks is None else chunks):
            chunk = found.chunks.pop(0)
            found.room.send(chunk, None if found.chunks else found.states)

    def poll(self, room: int) -> str:
        """The room's state, by its name."""
        return self._open[room].room.poll().name

    def wait(self, room: int, timeout_s: float) -> str:
        """Wait until the room has ended, and say how; "" if it has not."""
        state = self._open[room].room.wait(timeout_s)
        return state.name if state in {KVPoll.Success, KVPoll.Failed} else ""

    def failure(self, room: int) -> str:
        """Why it failed; "" if it has not."""
        error = self._open[room].room.failure()
        return "" if error is None else str(error)

    def abort(self, room: int, reason: str) -> None:
        """End the room from here."""
        self._open[room].room.abort(reason)

    def landed_bytes(self, room: int) -> int:
        """Bytes that came (decode)."""
        return int(self._open[room].room.get_transfer_metric().transfer_total_bytes or 0)

    def wanted_bytes(self, room: int) -> int:
        """Bytes that its part of the request has."""
        return sum(nbytes for _, nbytes in self._open[room].where.values())

    def clear(self, room: int) -> bool:
        """Give the room back, and its pages if nothing can touch them any more; says whether they were."""
        found = self._open[room]
        if not found.room.is_release_safe():
            return False
        if found.room.poll() is KVPoll.Failed:
            self.memory.accept(found.where)  # of a failed room some bytes may have come
        found.room.clear()
        for name, pages in found.lists.items():
            self._free[name] += pages.indices.tolist()
        del self._open[room]
        return True

    # -- what is right

    def differences(self) -> str:
        """Which bytes of its memory are not as they must be; "" if all are, guards and foreign pages included."""
        return self.memory.differences(self._last)

    def aux_row(self, room: int) -> list[int]:
        """A room's metadata row: its number, and the request's tokens."""
        return [int(value) for value in self.aux[room % AUX_ROWS]]

    def leftovers(self) -> list[str]:
        """What is not as it was at the start: rooms, grants, pages."""
        info = self.manager.info()
        found = {"rooms in use": info["rooms_in_use"], "unsettled rooms": info["unsettled"], "grants": info["grants"]}
        taken = {f"pages of {name}": n - len(self._free[name]) for name, n in self._pages.items()}
        return [f"{self.side.value} {self.layout.rank}: {n} {what}" for what, n in (found | taken).items() if n]

    def caps(self) -> list[str]:
        """What its engine can do, by the names of `Caps`."""
        return list(self.manager.info()["caps"])

    def health(self) -> str:
        """What is wrong with its threads; "" if nothing is."""
        return self.manager.health()

    def close(self) -> None:
        """Shut the manager down."""
        self.manager.shutdown()

    # -- helpers

    def _take(self, first_token: int, request: HandOff) -> dict[str, PageList]:
        """A page list per space, of pages that nobody has."""
        lists = {}
        for space in self.layout.spaces:
            logical = pages_of(space, first_token, request.num_tokens, request.rows)
            chosen = [self._free[space.name].pop() for _ in logical]
            first = logical[0] * space.page_tokens if logical else 0
            lists[space.name] = PageList(np.array(chosen, np.int32), first)
        return lists

    def _offer(
        self, request: HandOff, lists: dict[str, PageList], where: Cells, main: Pages,
        states: dict[str, Pages],
    ) -> _Open:  # fmt: skip
        self.memory.fill(where)
        row = request.room % AUX_ROWS
        self.aux[row] = (request.room, request.num_tokens)
        sender = KVSender(self.manager, None, request.room)
        sender.init(len(main), row, first_token=request.first_token, num_tokens=request.num_tokens, tag=request.room)
        each = request.chunk_pages
        chunks = [main[at : at + each] for at in range(0, len(main), each)] or [main]
        return _Open(sender, lists, where, chunks, states)

    def _claim(
        self, request: HandOff, lists: dict[str, PageList], where: Cells, main: Pages,
        states: dict[str, Pages], endpoints: Sequence[str],
    ) -> _Open:  # fmt: skip
        for source in self._others:
            self.memory.expect(where, _held(source, request))
        receiver = KVReceiver(self.manager, None, request.room, peers=list(endpoints))
        receiver.init(tag=request.room)
        receiver.send_metadata(main, request.room % AUX_ROWS, states, request.prefix, num_tokens=request.num_tokens)
        return _Open(receiver, lists, where, [], states)


def _held(layout: Layout, request: HandOff) -> list[Key]:
    """The elements of a request that a prefill rank holds, wherever it holds them."""
    first, count = request.first_token, request.num_tokens
    lists = {}
    for space in layout.spaces:
        logical = pages_of(space, first, count, request.rows)
        lists[space.name] = PageList(np.zeros(len(logical), np.int32), logical[0] * space.page_tokens if logical else 0)
    return list(cells(layout, lists, first, count, request.rows))


def _pages_of_space(layout: Layout, space: str) -> int:
    return min((tensor.pages for tensor in layout.tensors if tensor.space == space), default=4096)
