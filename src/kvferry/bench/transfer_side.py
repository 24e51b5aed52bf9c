"""One side of `kvferry bench transfer`, in a process of its own."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import msgspec
import numpy as np

from kvferry.api import KVArgs, KVClassType, KVManager, KVReceiver, KVSender, get_kv_class
from kvferry.bench.child import note
from kvferry.bench.habits import until_claimed, until_success
from kvferry.bench.pattern import fill, first_difference
from kvferry.bench.stream import StreamEnd
from kvferry.bench.transfer_spec import (
    TransferSpec,
    layout_of,
    manager_settings,
    rows_of,
    shares,
    source_pages,
    target_pages,
)
from kvferry.pool import allocate_pool

PREFILL_S = 0.02
"""Between naming the pages and sending them there is at least a forward pass; kvferry uses the time to prepare."""

GUARD_ROUND = (1 << 63) + 1
"""The pattern of pages that nothing is ever sent to; no round of a measurement has this number."""


class Setup(msgspec.Struct, frozen=True):
    """What a side is told."""

    spec: TransferSpec


class TransferSide:
    """A pool, and a manager over it for each value of the setting `digest`."""

    takes = Setup

    def __init__(self, setup: Setup, side: str, fill_round: int) -> None:
        spec = self.spec = setup.spec
        self.pool = allocate_pool(spec.pool_bytes, kind=spec.pool)
        self.words = self.pool.array[: spec.pool_bytes].view(np.uint64)
        fill(self.words, fill_round)
        manager = get_kv_class(spec.engine, KVClassType.MANAGER)
        args = KVArgs(layout_of(spec), [self.pool])
        self.managers: dict[str, KVManager] = {}
        try:
            for digest in spec.digests:
                self.managers[digest] = manager(args, side, **manager_settings(spec.mechanism, digest))
        except BaseException:
            self.close()
            raise

    def hello(self) -> dict[str, Any]:
        """Addresses, and what the pool lies on."""
        endpoints = {digest: manager.endpoint for digest, manager in self.managers.items()}
        return {"endpoints": endpoints, "pool_page_bytes": self.pool.page_bytes}

    def info(self) -> dict[str, Any]:
        """What the engine says of itself."""
        info: dict[str, Any] = next(iter(self.managers.values())).info()["engine_info"]
        return info

    def close(self) -> None:
        """Stop the managers."""
        for manager in self.managers.values():
            manager.shutdown()

    def room_numbers(self, round_number: int) -> range:
        """The room numbers of a round."""
        first = round_number * self.spec.inflight + 1
        return range(first, first + self.spec.inflight)


class PrefillSide(TransferSide):
    """Fills its pool, sends, and copies the same bytes with memcpy for comparison."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "prefill", 0)
        self.pages = shares(self.spec, source_pages(self.spec))
        self.scratch = allocate_pool(self.spec.nbytes, kind=self.spec.pool)
        self.senders: list[KVSender] = []
        self.stream = StreamEnd()

    def prepare(self, round_number: int, digest: str) -> None:
        """Write the round's bytes and open its rooms."""
        fill(self.words, round_number)
        manager = self.managers[digest]
        for room, pages in zip(self.room_numbers(round_number), self.pages, strict=True):
            self.senders.append(KVSender(manager, None, room))
            self.senders[-1].init(len(pages))

    def claimed(self) -> None:
        """Wait until the decode side has named its pages in every room, and as long as a short prefill takes."""
        until_claimed(self.senders, "wait", self.spec.round_limit_s)
        time.sleep(PREFILL_S)

    def send(self) -> dict[str, float]:
        """Send, wait until all is through; returns when it began and the CPU seconds of all threads."""
        cpu_s = time.process_time()
        begin_s = time.monotonic()
        for sender, pages in zip(self.senders, self.pages, strict=True):
            sender.send(pages)
        until_success(self.senders, "wait", self.spec.round_limit_s)
        cpu_s = time.process_time() - cpu_s
        for sender in self.senders:
            sender.clear()
        self.senders.clear()
        return {"begin_s": begin_s, "cpu_s": cpu_s}

    def memcpy(self) -> float:
        """Seconds that one memcpy of as many contiguous bytes takes, from this pool to another of its kind."""
        begin_s = time.monotonic()
        ctypes.memmove(self.scratch.address, self.pool.address, self.spec.nbytes)
        return time.monotonic() - begin_s

    def stream_connect(self, port: int) -> None:
        """Connect to the other side's plain socket."""
        self.stream.connect(port)

    def stream_send(self) -> float:
        """Send as many bytes of the pool through it; returns when it began."""
        begin_s = time.monotonic()
        self.stream.send(self.pool.array.data[: self.spec.nbytes])
        return begin_s

    def close(self) -> None:
        """Stop."""
        super().close()
        if hasattr(self, "stream"):
            self.stream.close()


class DecodeSide(TransferSide):
    """Names its pages, waits for the bytes, and compares all of them."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "decode", GUARD_ROUND)
        spec = self.spec
        self.source, self.target = source_pages(spec), target_pages(spec)
        self.pages = shares(spec, self.target)
        self.guards = np.setdiff1d(np.arange(spec.pool_pages), self.target)
        self.receivers: list[KVReceiver] = []
        self.stream = StreamEnd()

    def prepare(self, round_number: int, digest: str, endpoint: str) -> None:
        """Open the round's rooms and name their pages."""
        manager = self.managers[digest]
        for room, pages in zip(self.room_numbers(round_number), self.pages, strict=True):
            receiver = KVReceiver(manager, None, room, peers=[endpoint])
            self.receivers.append(receiver)
            receiver.init()
            receiver.send_metadata(pages)

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
        """Compare every byte of the pool; returns what is wrong, in words, or an empty text."""
        rows = rows_of(self.spec, self.pool.array)
        source = dict(zip(self.target.tolist(), self.source.tolist(), strict=True))
        pages, words = rows.shape[1:]
        for tensor, page in np.ndindex(len(rows), pages):
            expected_page = source.get(page, page)
            pattern = round_number if page in source else GUARD_ROUND
            at = first_difference(rows[tensor, page], pattern, (tensor * pages + expected_page) * words)
            if at >= 0:
                what = (
                    f"which holds page {source[page]} of the source" if page in source else "which belongs to no room"
                )
                return (
                    f"round {round_number}: byte {8 * at} of page {page}, tensor {tensor}, differs; "
                    f"the page is one {what}: found {int(rows[tensor, page, at]):#018x}"
                )
        return ""

    def stream_listen(self) -> int:
        """Open a plain socket for the comparison; returns its port."""
        return self.stream.listen()

    def stream_receive(self) -> float:
        """Take as many bytes into one hot buffer; returns when the last one was there."""
        note("waiting")
        self.stream.receive(self.spec.nbytes)
        return time.monotonic()

    def close(self) -> None:
        """Stop."""
        super().close()
        if hasattr(self, "stream"):
            self.stream.close()
