"""Schedulers with the queues of SGLang's disaggregation mode, in its order of calls.

Prefill: bootstrap queue -> waiting queue -> forward -> inflight queue. Decode: prealloc queue -> transfer queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from pools import CACHED, FREE, PAGE_TOKENS, RELEASED, Pool, Request, make_pool
from ranks import SETTINGS, Entry, Fleet, RankGroup, SchedulerRank, Stream, StreamEvent

from kvferry import KVManager, KVPoll, KVReceiver, KVSender
from kvferry.ids import Rank


class PrefillOptions(NamedTuple):
    """How the prefill side runs.

    Attributes:
        chunk_tokens: tokens of one forward.
        overlap: results are processed one step after their forward, whose writes are done two steps later still.
        attempts: forwards that a request may have before any claim came.
        early_send: send before any claim came, without waiting for the decode side's prefix.
    """

    chunk_tokens: int = 1 << 20
    overlap: bool = False
    attempts: int = 0
    early_send: bool = False


class Result(NamedTuple):
    """What a forward leaves for the processing of its results."""

    serial: int
    end_token: int
    event: StreamEvent


class PrefillRank(SchedulerRank):
    """event_loop_normal_disagg_prefill and event_loop_overlap_disagg_prefill."""

    stages = ("bootstrap", "waiting", "inflight")
    released_fill = RELEASED

    def __init__(self, *args: Any, options: PrefillOptions) -> None:
        super().__init__(*args)
        self.options = options
        self.stream = Stream(3 if options.overlap else 0)
        self.last_results: list[Result] = []

    def run_queues(self) -> None:
        if "stream" not in self.paused:
            self.stream.advance()
        self.pop_bootstrapped()
        self.resolve_waiting_queue_bootstrap()
        results = [] if "forward" in self.paused else self.run_batch()
        if self.options.overlap:
            results, self.last_results = self.last_results, results
        self.process_batch_result(results)
        self.process_inflight_queue()

    # -- bootstrap queue

    def create(self, request: Request) -> Entry:
        """create_sender: when the request arrives."""
        sender = KVSender(self.mgr, self.bootstrap_addr, request.room)
        return Entry(request, sender, attempts=self.options.attempts)

    def pop_bootstrapped(self) -> None:
        for serial, state in self.poll("bootstrap").items():
            entry = self.queues["bootstrap"][serial]
            if state.poll is KVPoll.Failed:
                self.fail("bootstrap", serial)
                continue
            if state.poll is KVPoll.Bootstrapping and not self.options.early_send and not entry.attempts:
                continue
            if state.poll is not KVPoll.Bootstrapping or self.options.early_send:
                self.finalize_bootstrap(entry)
            if not entry.pages:
                entry.pages = self.pool.take_pages(entry.num_pages) or []
            self.queues["waiting"][serial] = self.queues["bootstrap"].pop(serial)

    def finalize_bootstrap(self, entry: Entry) -> None:
        prefix = entry.sender.pop_decode_prefix_len()
        entry.slot = self.pool.free_slots.pop()
        entry.sent_pages = prefix // PAGE_TOKENS
        entry.sender.init(
            entry.num_pages - entry.sent_pages, entry.slot, first_token=prefix,
            num_tokens=len(entry.request.tokens), tag=entry.request.tag,
        )  # fmt: skip
        entry.bootstrapped = True

    # -- waiting queue and forward

    def resolve_waiting_queue_bootstrap(self) -> None:
        for serial, state in self.poll("waiting").items():
            entry = self.queues["waiting"][serial]
            if state.poll is KVPoll.Failed:
                self.fail("waiting", serial)
            elif state.poll is KVPoll.WaitingForInput and not entry.bootstrapped:
                self.finalize_bootstrap(entry)

    def run_batch(self) -> list[Result]:
        results = []
        for serial, entry in self.queues["waiting"].items():
            begin, tokens = entry.computed, len(entry.request.tokens)
            if begin == tokens:  # its last result is on its way
                continue
            entry.computed = end = min(begin + self.options.chunk_tokens, tokens)
            event = self.stream.launch(self._forward(entry, begin, end))
            entry.events.append(event)
            results.append(Result(serial, end, event))
        return results

    def _forward(self, entry: Entry, begin: int, end: int) -> Any:
        return lambda: self.pool.write(entry.request, entry.pages, begin, end)

    def process_batch_result(self, results: list[Result]) -> None:
        for serial, end_token, event in results:
            entry = self.queues["waiting"].get(serial)
            if entry is None:  # it failed in between
                continue
            last = end_token == len(entry.request.tokens)
            if entry.bootstrapped:
                self.send_kv_chunk(entry, end_token, last, event)
                if last:
                    self.queues["inflight"][serial] = self.queues["waiting"].pop(serial)
            elif last:  # computed too early: its last token is computed again once the bootstrap is done
                entry.computed = end_token - 1
                entry.attempts -= 1
                self.queues["bootstrap"][serial] = self.queues["waiting"].pop(serial)

    def send_kv_chunk(self, entry: Entry, end_token: int, last: bool, event: StreamEvent) -> None:
        end_page = entry.num_pages if last else end_token // PAGE_TOKENS
        pages = np.array(entry.pages[entry.sent_pages : end_page], np.int32)
        if last:
            row = [entry.request.room, entry.request.first_output, end_token]
            self.pool.aux[entry.slot, : len(row)] = row
        if not entry.sender.should_send_kv_chunk(len(pages), last):
            return
        entry.sent_pages = max(end_page, entry.sent_pages)
        entry.sender.send(pages, after=event if self.options.overlap else None)

    # -- inflight queue

    def process_inflight_queue(self) -> None:
        for serial, state in self.poll("inflight").items():
            if state.poll is KVPoll.Failed:
                self.fail("inflight", serial)
            elif state.poll is KVPoll.Success:
                assert state.is_release_safe
                self.finish("inflight", serial)


class DecodeRank(SchedulerRank):
    """process_decode_queue."""

    stages = ("prealloc", "transfer")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.aux_rows: dict[int, list[int]] = {}
        self.wrong: list[str] = []

    def run_queues(self) -> None:
        self.init_receivers()
        self.pop_preallocated()
        self.pop_transferred()

    # -- prealloc queue

    def create(self, request: Request) -> Entry:
        """_create_receiver_and_enqueue."""
        return Entry(request, KVReceiver(self.mgr, self.bootstrap_addr, request.room))

    def init_receivers(self) -> None:
        """The DP rank of a request is known one step after it came."""
        for entry in self.queues["prealloc"].values():
            if entry.attempts:
                continue
            entry.attempts = 1
            entry.receiver.init(0, tag=entry.request.tag)

    def pop_preallocated(self) -> None:
        for serial, state in self.poll("prealloc").items():
            if state.poll is KVPoll.Failed:
                self.fail("prealloc", serial)
            elif state.poll is KVPoll.WaitingForInput and "prealloc" not in self.paused:
                self.preallocate(serial, self.queues["prealloc"][serial])

    def preallocate(self, serial: int, entry: Entry) -> None:
        taken = self.pool.take_pages(entry.num_pages)
        if taken is None:
            return
        prefix = entry.request.decode_prefix
        cached, fresh = taken[: prefix // PAGE_TOKENS], taken[prefix // PAGE_TOKENS :]
        self.pool.cells[cached] = CACHED
        entry.pages, entry.cached_pages = fresh, cached
        entry.slot = self.pool.free_slots.pop()
        entry.receiver.send_metadata(
            np.array(fresh, np.int32), entry.slot, None, prefix, num_tokens=len(entry.request.tokens)
        )
        self.queues["transfer"][serial] = self.queues["prealloc"].pop(serial)

    # -- transfer queue

    def pop_transferred(self) -> None:
        for serial, state in self.poll("transfer").items():
            if state.poll is KVPoll.Failed:
                self.fail("transfer", serial)
            elif state.poll is KVPoll.Success:
                self.commit(serial, self.queues["transfer"][serial])

    def commit(self, serial: int, entry: Entry) -> None:
        """The metadata gate, then what the first decode step would read."""
        request = entry.request
        row = self.aux_rows[request.room] = self.pool.aux[entry.slot].tolist()
        if row[0] != request.room:
            self.wrong.append(f"room {request.room}: metadata corruption, the row holds {row}")
        if not self.pool.holds(request, entry.pages, request.decode_prefix):
            self.wrong.append(f"room {request.room}: KV bytes differ on rank {self.rank}")
        if (self.pool.cells[entry.cached_pages] != CACHED).any():
            self.wrong.append(f"room {request.room}: the prefix was written on rank {self.rank}")
        self.finish("transfer", serial)


class World:
    """A prefill and a decode fleet, their managers and pools, and the router that tells both of a request."""

    def __init__(
        self, bootstrap_addr: str, *, prefill_tp: int = 1, decode_tp: int = 1, decode_order: str = "page_major",
        options: PrefillOptions | None = None,
    ) -> None:  # fmt: skip
        chosen = options or PrefillOptions()
        self.prefill_pools = [make_pool("page_major", tp, prefill_tp) for tp in range(prefill_tp)]
        self.decode_pools = [make_pool(decode_order, tp, decode_tp) for tp in range(decode_tp)]
        sizes = Rank(1, 1, 1, prefill_tp)
        self.prefill_managers = [
            KVManager(pool.args(), "prefill", environ={}, bootstrap_addr=bootstrap_addr, sizes=sizes, **SETTINGS)
            for pool in self.prefill_pools
        ]
        self.decode_managers = [KVManager(pool.args(), "decode", environ={}, **SETTINGS) for pool in self.decode_pools]

        def fleet(make: Callable[..., SchedulerRank], managers: Sequence[KVManager], pools: Sequence[Pool]) -> Fleet:
            group = RankGroup(len(pools))
            pairs = enumerate(zip(managers, pools, strict=True))
            return Fleet(group, [make(mgr, pool, group, rank, bootstrap_addr) for rank, (mgr, pool) in pairs])

        def prefill_rank(*args: Any) -> PrefillRank:
            return PrefillRank(*args, options=chosen)

        self.prefill = fleet(prefill_rank, self.prefill_managers, self.prefill_pools)
        self.decode = fleet(DecodeRank, self.decode_managers, self.decode_pools)

    @property
    def decode_ranks(self) -> list[DecodeRank]:
        return [rank for rank in self.decode.ranks if isinstance(rank, DecodeRank)]

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.prefill.tell("add", request)
            self.decode.tell("add", request)

    def wait(self, condition: Callable[[], Any], what: str, limit_s: float = 15.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            for error in self.prefill.errors + self.decode.errors:
                raise error
            assert time.monotonic() < deadline, f"not within {limit_s} s: {what}; {self.prefill_log} {self.decode_log}"
            time.sleep(0.002)

    def wait_ended(self, *rooms: int, nth: int = 0) -> None:
        """Until both sides are done with the rooms."""
        self.wait(
            lambda: all(fleet.outcome(room, nth) for fleet in (self.prefill, self.decode) for room in rooms),
            f"end {nth} of rooms {rooms}",
        )

    def wait_released(self, *rooms: int) -> None:
        """Until no queue, that of held pages included, has the rooms any more."""
        self.wait(
            lambda: not any(fleet.where(room) for fleet in (self.prefill, self.decode) for room in rooms),
            f"pages of rooms {rooms} back",
        )

    def check_success(self, *requests: Request, nth: int = 0) -> None:
        """Every request went the whole way, and on each decode rank its bytes and its metadata row were right."""
        rooms = [request.room for request in requests]
        self.wait_ended(*rooms, nth=nth)
        self.wait_released(*rooms)
        for fleet, queue in ((self.prefill, "inflight"), (self.decode, "transfer")):
            for request in requests:
                found = fleet.outcome(request.room, nth)
                assert found is not None
                assert found[1:] == (request.room, queue, "")
        for rank in self.decode_ranks:
            assert rank.wrong == []
            for request in requests:
                row = [request.room, request.first_output, len(request.tokens), 0, 0, 0, 0, 0]
                assert rank.aux_rows[request.room] == row

    @property
    def prefill_log(self) -> list[Any]:
        return [rank.log for rank in self.prefill.ranks]

    @property
    def decode_log(self) -> list[Any]:
        return [rank.log for rank in self.decode.ranks]

    def close(self) -> None:
        for fleet in (self.prefill, self.decode):
            fleet.stop()
        for manager in (*self.decode_managers, *self.prefill_managers):
            manager.shutdown()
        for error in self.prefill.errors + self.decode.errors:
            raise error
        self.check_memory()

    def check_memory(self) -> None:
        """All pages and slots are back, nothing was written to pages that nobody owned, guards included."""
        for pool, allowed in [(p, (FREE, RELEASED)) for p in self.prefill_pools] + [
            (p, (FREE,)) for p in self.decode_pools
        ]:
            assert (len(pool.free_pages), len(pool.free_slots)) == (len(pool.cells) - 2, len(pool.aux))
            assert pool.guards_intact()
            assert pool.stray_bytes(allowed) == 0
            assert not pool.aux.any()
