"""One side of `kvferry bench transfer`, in a process of its own that holds all ranks of the side."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvferry.api import KVArgs, KVClassType, KVManager, KVReceiver, KVSender, get_kv_class
from kvferry.bench import bare
from kvferry.bench.bare_rows import Block, joined, planned
from kvferry.bench.child import note
from kvferry.bench.fixed_pages import FixedPages
from kvferry.bench.geometry import Geometry, Share
from kvferry.bench.habits import until_claimed, until_success
from kvferry.bench.model_request import ModelRequest
from kvferry.bench.stream import StreamEnd
from kvferry.bench.transfer_spec import TransferSpec, manager_settings
from kvferry.plan import Batch
from kvferry.pool import Pool, allocate_pool


class Setup(msgspec.Struct, frozen=True):
    """What a side is told."""

    spec: TransferSpec


def geometry_of(spec: TransferSpec) -> Geometry:
    """What a round moves."""
    return FixedPages(spec) if spec.case is None else ModelRequest(spec, spec.case)


class TransferSide:
    """A pool for each rank, and a manager over it for each value of the setting `digest`."""

    takes = Setup

    def __init__(self, setup: Setup, side: str) -> None:
        spec = self.spec = setup.spec
        self.geometry = geometry_of(spec)
        self.shares = self.geometry.shares(side)
        self.pools = [allocate_pool(nbytes, kind=spec.pool) for nbytes in self.geometry.pool_bytes(side)]
        self.arrays = [pool.array for pool in self.pools]
        self.geometry.begin(side, self.arrays)
        self.stream = StreamEnd()
        self.managers: dict[str, list[KVManager]] = {digest: [] for digest in spec.digests}
        self.bare: bare.Bare | None = None
        try:
            self._start(side)
        except BaseException:
            self.close()
            raise

    def hello(self) -> dict[str, Any]:
        """Addresses, and what the pools lie on."""
        return {
            "endpoints": {digest: [each.endpoint for each in ranks] for digest, ranks in self.managers.items()},
            "pool_page_bytes": min(pool.page_bytes for pool in self.pools),
            "blocks": self.blocks,
        }

    @property
    def blocks(self) -> list[Block]:
        """Address and bytes of each rank's memory."""
        return [(pool.address, pool.nbytes) for pool in self.pools]

    def info(self) -> dict[str, Any]:
        """What the first rank's engine says of itself, with the peers of all ranks."""
        found: list[dict[str, Any]] = [each.info()["engine_info"] for each in next(iter(self.managers.values()))]
        peers = {peer: how for info in found for peer, how in info.get("peers", {}).items()}
        return found[0] | ({"peers": peers} if "peers" in found[0] else {})

    def bare_start(self) -> str:
        """Start the engine's own library over the same memory; returns what the other side has to know."""
        self.bare = bare.make(self.spec.engine, self.blocks)
        return self.bare.describe()

    def close(self) -> None:
        """Stop the managers."""
        if self.bare is not None:
            self.bare.close()
        self.stream.close()
        for ranks in self.managers.values():
            for manager in ranks:
                manager.shutdown()

    def of_round(self, round_number: int, digest: str) -> Iterator[tuple[KVManager, int, Share]]:
        """The parts of all ranks in all requests of a round: manager, room number, pages."""
        first = round_number * self.spec.inflight + 1
        for share in self.shares:
            yield self.managers[digest][share.rank], first + share.room, share

    def _start(self, side: str) -> None:
        spec, layouts = self.spec, self.geometry.layouts(side)
        kind = get_kv_class(spec.engine, KVClassType.MANAGER)
        for digest, ranks in self.managers.items():
            for layout, pool in zip(layouts, self.pools, strict=True):
                args = KVArgs(layout, [pool], group=layouts if len(layouts) > 1 else ())
                ranks.append(kind(args, side, **manager_settings(spec.mechanism, digest)))


class PrefillSide(TransferSide):
    """Fills its pools, sends, and copies the same bytes with memcpy for comparison."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "prefill")
        self.scratch = allocate_pool(self.spec.nbytes, kind=self.spec.pool)
        self.senders: list[tuple[KVSender, Share]] = []
        self.batches: list[Batch] = []

    def prepare(self, round_number: int, digest: str) -> None:
        """Write the round's bytes and open its rooms."""
        self.fill(round_number)
        for manager, room, share in self.of_round(round_number, digest):
            sender = KVSender(manager, None, room)
            self.senders.append((sender, share))
            sender.init(len(share.pages), num_tokens=self.geometry.tokens)

    def fill(self, round_number: int) -> None:
        """Write the round's bytes."""
        self.geometry.fill(self.arrays, round_number)

    def claimed(self) -> None:
        """Wait until the decode side has named its pages in every room, and as long as a forward pass is to take."""
        until_claimed([sender for sender, _ in self.senders], "wait", self.spec.round_limit_s)
        time.sleep(self.spec.forward_ms / 1000)

    def send(self) -> dict[str, float]:
        """Send, wait until all is through; returns when it began and the CPU seconds of all threads."""
        cpu_s = time.process_time()
        begin_s = time.monotonic()
        for sender, share in self.senders:
            sender.send(share.pages, share.states or None)
        until_success([sender for sender, _ in self.senders], "wait", self.spec.round_limit_s)
        cpu_s = time.process_time() - cpu_s
        for sender, _ in self.senders:
            sender.clear()
        self.senders.clear()
        return {"begin_s": begin_s, "cpu_s": cpu_s}

    def memcpy(self) -> float:
        """Seconds that a memcpy of as many bytes takes, one run of each rank's pool to another of its kind."""
        target = self.scratch.address
        begin_s = time.monotonic()
        for pool, nbytes in portions(self.pools, self.spec.nbytes):
            ctypes.memmove(target, pool.address, nbytes)
            target += nbytes
        return time.monotonic() - begin_s

    def stream_connect(self, port: int) -> None:
        """Connect to the other side's plain socket."""
        self.stream.connect(port)

    def stream_send(self) -> float:
        """Send as many bytes of the pools through it; returns when it began."""
        begin_s = time.monotonic()
        for pool, nbytes in portions(self.pools, self.spec.nbytes):
            self.stream.send(pool.array.data[:nbytes])
        return begin_s

    def bare_attach(self, described: str, decode_blocks: list[Block]) -> dict[str, int]:
        """Get to know the other side's library, and plan the rows; returns how many there are."""
        assert self.bare is not None
        self.bare.attach(described)
        limits = next(iter(self.managers.values()))[0].node.limits
        self.batches = planned(self.geometry, self.blocks, [(a, n) for a, n in decode_blocks], limits)
        return {"rows": sum(map(len, self.batches)), "batches": len(self.batches)}

    def bare_write(self, one: bool) -> dict[str, float]:
        """Have the library write the round, in kvferry's batches or as one; seconds, and CPU of all threads."""
        assert self.bare is not None
        batches = [joined(self.batches)] if one else self.batches
        cpu_s = time.process_time()
        begin_s = time.monotonic()
        self.bare.write(batches)
        seconds = time.monotonic() - begin_s
        cpu_s = time.process_time() - cpu_s
        self.bare.tell()
        return {"seconds": seconds, "cpu_s": cpu_s}


class DecodeSide(TransferSide):
    """Names its pages, waits for the bytes, and compares all of them."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "decode")
        self.receivers: list[KVReceiver] = []

    def prepare(self, round_number: int, digest: str, endpoints: list[str]) -> None:
        """Open the round's rooms and name their pages."""
        for manager, room, share in self.of_round(round_number, digest):
            receiver = KVReceiver(manager, None, room, peers=endpoints)
            self.receivers.append(receiver)
            receiver.init()
            if self.geometry.tokens is None and not share.states:
                receiver.send_metadata(share.pages)
            else:
                receiver.send_metadata(share.pages, None, share.states, num_tokens=self.geometry.tokens)

    def receive(self) -> dict[str, float]:
        """Wait until all is there; returns when it was and the CPU seconds of all threads, polling included."""
        note("waiting")
        cpu_s = time.process_time()
        until_success(self.receivers, self.spec.wait, self.spec.round_limit_s)
        end_s = time.monotonic()
        cpu_s = time.process_time() - cpu_s
        for receiver in self.receivers:
            receiver.clear()
        self.receivers.clear()
        return {"end_s": end_s, "cpu_s": cpu_s}

    def check(self, round_number: int) -> str:
        """Compare every byte of the pools; returns what is wrong, in words, or an empty text."""
        return self.geometry.check(self.arrays, round_number)

    def stream_listen(self) -> int:
        """Open a plain socket for the comparison; returns its port."""
        return self.stream.listen()

    def stream_receive(self) -> float:
        """Take as many bytes into one hot buffer; returns when the last one was there."""
        note("waiting")
        self.stream.receive(self.spec.nbytes)
        return time.monotonic()

    def bare_serve(self) -> None:
        """Do what the library needs done while it is written to."""
        assert self.bare is not None
        note("waiting")
        self.bare.serve(self.spec.round_limit_s)


def portions(pools: Sequence[Pool], nbytes: int) -> Iterator[tuple[Pool, int]]:
    """Pools in turns, with how many bytes of each make so many together; from the first on again where they end."""
    while nbytes > 0:
        for pool in pools:
            count = min(pool.nbytes, nbytes)
            if count:
                yield pool, count
            nbytes -= count
