"""One rank of the demo: what a worker process is told, and what it has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import numpy as np

from kvferry.api import KVArgs, KVClassType, KVManager, KVPoll, KVReceiver, KVSender, get_kv_class
from kvferry.ids import Side
from kvferry.layout import Layout, bind, num_pages
from kvferry.obs import EventWriter
from kvferry.pool import allocate_pool
from kvferry.serve.cache_file import CacheFile, Shape
from kvferry.serve.generate import blas_fingerprint
from kvferry.serve.grids import DEFAULT_GRID, grid_sizes, rank_layouts, read_grid, shape_of
from kvferry.serve.model import Model
from kvferry.serve.share import Share
from kvferry.serve.weights import find_model, load

LOOK_S = 1.0
"""How often a worker that waits looks whether its conductor is still there."""
FILLS = {Side.PREFILL: 0xDD, Side.DECODE: 0xEE}
"""What a pool holds before the request comes."""


class Start(msgspec.Struct, frozen=True):
    """How a worker is set up: its first line of standard input.

    Attributes:
        model: path of a GGUF file; None is the packaged model.
        engine: name of the transfer engine.
        num_tokens: tokens of the prompt.
        max_tokens: tokens of prompt and answer.
        prefill: the prefill side's parallel grid.
        decode: the decode side's.
        name: what the worker calls itself in its events.
        rank: its number in its side's grid.
        bootstrap: "host:port" of the bootstrap server.
        folder: where the logical caches of both sides are.
        seed: decides on which pages the request lies.
    """

    model: str | None
    engine: str
    num_tokens: int
    max_tokens: int
    prefill: str = DEFAULT_GRID
    decode: str = DEFAULT_GRID
    name: str = ""
    rank: int = 0
    bootstrap: str = ""
    folder: str = ""
    seed: int = 0


class Request(msgspec.Struct, frozen=True):
    """One request: the second line. `tokens` is only said to the prefill workers."""

    room: int
    tag: int
    num_tokens: int
    max_new_tokens: int
    tokens: list[int] = []


class Go(msgspec.Struct, frozen=True):
    """All ranks are so far: the line that begins a worker's next step."""

    go: bool = True


class RankWorker:
    """What all workers have: a model, registered memory, a manager, and the logical caches of both sides.

    Attributes:
        side: which side it serves.
        start: how it was set up.
        events: where it reports.
        model: the whole model, on every rank.
        is_alone: whether its side has no other rank.
        pool: uint8[N], the registered memory, with the rank's share of the cache.
        pages: int32[P], where the request lies in the pool, in logical order.
        aux: int64[slots, 8], the metadata rows.
        share: the rank's share of the request.
        handed: the logical cache of what the prefill ranks' pools hold.
        landed: the same of the decode ranks' pools.
        manager: the rank's manager.
    """

    def __init__(self, side: Side, start: Start, events: EventWriter) -> None:
        self.side, self.start, self.events = side, start, events
        self._parent = os.getppid()
        events.write("stage", text="loading the model")
        path = find_model(start.model)
        weights = load(path)
        self.model = Model(weights)
        grid = read_grid(start.prefill if side is Side.PREFILL else start.decode, side)
        layouts = rank_layouts(shape_of(path.name, weights.config), grid, start.num_tokens)
        layout = layouts[start.rank]
        self.is_alone = len(layouts) == 1
        self.pool = allocate_pool(max(tensor.address + tensor.nbytes for tensor in layout.tensors)).array
        self.pool.fill(FILLS[side])
        self.pages = self._scattered(layout)
        bound = bind(layout, [(self.pool.ctypes.data, self.pool.nbytes)])
        self.share = Share(bound, self.pool, self.pages, start.num_tokens)
        self.handed, self.landed = (self._open(each) for each in Side)
        self.aux = np.zeros((4, 8), np.int64)
        args = KVArgs(bound, [], [self.aux], group=layouts)
        manager = get_kv_class(start.engine, KVClassType.MANAGER)
        self.manager: KVManager = manager(args, side, bootstrap_addr=start.bootstrap, sizes=grid_sizes(grid))
        events.write("ready", arithmetic=blas_fingerprint(), engine=self.manager.info()["engine_info"])

    @property
    def leads(self) -> bool:
        """Whether it is the rank that generates for its side."""
        return self.start.rank == 0

    def stage(self, text: str) -> None:
        """Say what is done now."""
        self.events.write("stage", text=text)

    def wait_for_go(self) -> None:
        """Wait until all ranks are so far; leave if the conductor wants to."""
        if not sys.stdin.readline().strip():
            sys.exit(1)

    def wait_for(self, room: KVSender | KVReceiver) -> int:
        """Wait until a room has ended, as long as the conductor is there, who has the clock.

        Returns:
            The bytes that were moved.

        Raises:
            KVTransferError: the room has failed.
        """
        while (state := room.wait(LOOK_S)) not in {KVPoll.Success, KVPoll.Failed}:
            if os.getppid() != self._parent:
                sys.exit(1)
        if state is KVPoll.Failed:
            room.failure_exception()
        return room.get_transfer_metric().transfer_total_bytes

    def _scattered(self, layout: Layout) -> np.ndarray:
        """Pages for the rank's share: real pools are fragmented, and pages in order would hide mistakes."""
        needed = num_pages(layout.spaces[0], 0, self.start.num_tokens)
        order = np.random.default_rng(self.start.seed).permutation(layout.tensors[0].pages)
        return order[:needed].astype(np.int32)

    def _open(self, side: Side) -> CacheFile:
        config = self.model.config
        shape: Shape = (config.layers, 2, config.kv_heads, self.start.num_tokens, config.head_dim)
        return CacheFile(cache_path(self.start.folder, side), shape)


def cache_path(folder: str, side: Side) -> Path:
    """Where the logical cache of a side is."""
    return Path(folder) / f"{side.value}.kv"
