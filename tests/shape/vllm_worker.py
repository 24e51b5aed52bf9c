"""The worker half of a vLLM-shaped connector, in a process of its own, and the model runner that calls it.

Everything that comes here from the scheduler half is plain data in a pickle. Two KV cache groups: full attention
("kv", layers 0 and 1) and sliding window ("swa", layer 2); block ids are unique over both, as in vLLM's block pool.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
from pools import FREE, PAGE_TOKENS, RELEASED, Request
from ranks import SETTINGS

from kvferry import KVArgs, KVManager, KVPoll, KVReceiver, KVSender, ReceiveFacts, SendFacts
from kvferry.layout import Field, Layout, Space, Strides, Tensor, Window

BLOCKS, WINDOW_TOKENS, HEADS, KV_BYTES = 64, 40, 2, 32
GROUP_OF_LAYER = ("kv", "kv", "swa")

U8 = npt.NDArray[np.uint8]
Groups = dict[str, list[int]]
"""Block ids by group; those of "swa" begin with the block of the window's first token."""


def window_start(num_tokens: int) -> int:
    """First block of a request's sliding window."""
    return max(num_tokens - WINDOW_TOKENS, 0) // PAGE_TOKENS


@dataclass(frozen=True)
class Forward:
    """Tokens [begin, end) of a request to be computed."""

    request: Request
    groups: Groups
    begin: int
    end: int


@dataclass(frozen=True)
class SchedulerOutput:
    """What the runner does in one step; `freed` are blocks that nobody owns any more."""

    forwards: list[Forward]
    freed: list[int]
    finished_req_ids: set[str]


@dataclass(frozen=True)
class Chunk:
    """Blocks that a forward completes."""

    kv: list[int]
    state: Groups


@dataclass(frozen=True)
class ConnectorMetadata:
    """What the scheduler half decided; by request id."""

    sends: dict[str, SendFacts] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    receives: dict[str, ReceiveFacts] = field(default_factory=dict)
    aborts: dict[str, str] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerOutput:
    """What the worker half reports after a step."""

    sent: set[str]
    received: set[str]
    load_errors: set[int]
    reasons: dict[str, str]


class WorkerHalf:
    """KVConnectorBase_V1 with role WORKER, as far as it is used here."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.senders: dict[str, KVSender] = {}
        self.receivers: dict[str, KVReceiver] = {}
        self.reasons: dict[str, str] = {}
        self._blocks: dict[str, list[int]] = {}
        self._finished: set[str] = set()
        self._load_errors: set[int] = set()

    def register_kv_caches(self, kv_caches: Sequence[U8]) -> None:
        """One array per layer: uint8[block, token, head, k and v]."""
        fields = (Field("k", KV_BYTES // 2), Field("v", KV_BYTES // 2))
        token = HEADS * KV_BYTES
        strides = Strides(page=PAGE_TOKENS * token, token=token, head=KV_BYTES)
        tensors = tuple(
            Tensor(
                group,
                (layer,),
                ((0, HEADS),),
                fields,
                0,
                BLOCKS * strides.page,
                strides,
                strides.page,
                BLOCKS,
            )
            for layer, group in enumerate(GROUP_OF_LAYER)
        )
        spaces = (Space("kv", PAGE_TOKENS), Space("swa", PAGE_TOKENS, coverage=Window(WINDOW_TOKENS)))
        layout = Layout("shape", "float16", HEADS, tensors, spaces)
        self.manager = KVManager(KVArgs(layout, kv_caches), self.side, environ={}, **SETTINGS)

    def get_handshake_metadata(self) -> str:
        return self.manager.endpoint

    def handle_preemptions(self, meta: ConnectorMetadata) -> None:
        """The blocks of these requests are overwritten in this step: wait, briefly, until nothing reads them."""
        for req_id in meta.preempted:
            sender = self.senders.pop(req_id, None)
            if sender is None:
                continue
            sender.abort(f"request {req_id} was preempted")
            _wait_released(sender, limit_s=2.0)
            sender.clear()

    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        for req_id, facts in meta.receives.items():
            self.receivers[req_id] = KVReceiver.from_facts(self.manager, facts)
            self._blocks[req_id] = [*facts.kv_indices, *facts.state_indices["swa"]]

    def finish_forward(self, meta: ConnectorMetadata) -> None:
        for req_id, send in meta.sends.items():
            self.senders[req_id] = KVSender.from_facts(self.manager, send)
        for req_id, chunk in meta.chunks.items():
            self.senders[req_id].send(chunk.kv, chunk.state or None)
        for req_id, reason in meta.aborts.items():
            room = self.senders.get(req_id) or self.receivers.get(req_id)
            if room is not None:
                room.abort(reason)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks are free to use again; a sender's only once the scheduler is done with it."""
        self._finished |= finished_req_ids
        sent = {req_id for req_id, sender in self.senders.items() if req_id in self._finished and _is_over(sender)}
        received = {req_id for req_id, receiver in self.receivers.items() if _is_over(receiver)}
        self._finished -= sent
        for req_id in sent:
            self._note_end(req_id, self.senders.pop(req_id))
        for req_id in received:
            blocks = self._blocks.pop(req_id)
            if self._note_end(req_id, self.receivers.pop(req_id)):
                self._load_errors |= set(blocks)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        found, self._load_errors = self._load_errors, set()
        return found

    def shutdown(self) -> None:
        self.manager.shutdown()

    def _note_end(self, req_id: str, room: KVSender | KVReceiver) -> bool:
        error = room.failure()
        room.clear()
        if error is not None:
            self.reasons[req_id] = str(error)
        return error is not None


def _is_over(room: KVSender | KVReceiver) -> bool:
    return room.poll() in {KVPoll.Success, KVPoll.Failed} and room.is_release_safe()


def _wait_released(room: KVSender | KVReceiver, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not room.is_release_safe():
        readable, _, _ = select.select([room.fileno()], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"room {room.bootstrap_room}: pages not released within {limit_s} s"
        os.eventfd_read(room.fileno())


class Runner:
    """The model runner: memory, forwards, and the worker half's calls in the order of vLLM."""

    def __init__(self, side: str) -> None:
        shape = (BLOCKS, PAGE_TOKENS, HEADS, KV_BYTES)
        self.caches = [np.full(shape, FREE, np.uint8) for _ in GROUP_OF_LAYER]
        self.released_fill = RELEASED if side == "prefill" else FREE
        self.connector = WorkerHalf(side)
        self.connector.register_kv_caches(self.caches)

    def execute_model(self, output: SchedulerOutput, meta: ConnectorMetadata) -> WorkerOutput:
        for cache in self.caches:
            cache[np.array(output.freed, np.int64)] = self.released_fill
        connector = self.connector
        connector.handle_preemptions(meta)
        for forward in output.forwards:
            self._compute(forward)
        connector.start_load_kv(meta)
        connector.finish_forward(meta)
        sent, received = connector.get_finished(output.finished_req_ids)
        errors = connector.get_block_ids_with_load_errors()
        reasons, connector.reasons = connector.reasons, {}
        return WorkerOutput(sent, received, errors, reasons)

    def holds(self, request: Request, groups: Groups, prefix: int) -> bool:
        """Whether every token that a decode step reads is right."""
        end, data = len(request.tokens), _kv_of(request)
        starts = {"kv": prefix, "swa": max(prefix, window_start(end) * PAGE_TOKENS)}
        return all(
            bool((cache[_cells(groups, group, starts[group], end)] == data[layer, starts[group] :]).all())
            for layer, (cache, group) in enumerate(zip(self.caches, GROUP_OF_LAYER, strict=True))
        )

    def bytes_landed(self, req_id: str) -> int:
        """Of a request that is being received."""
        return self.connector.receivers[req_id].get_transfer_metric().transfer_total_bytes

    def stray_bytes(self, free: list[int]) -> int:
        """Bytes in blocks that nobody owns that were written all the same."""
        allowed = [FREE, self.released_fill]
        return sum(int((~np.isin(cache[free], allowed)).sum()) for cache in self.caches)

    def shut_down(self) -> list[str]:
        """Names of threads that are left."""
        self.connector.shutdown()
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry-")]

    def _compute(self, forward: Forward) -> None:
        data = _kv_of(forward.request)
        first_kept = window_start(len(forward.request.tokens)) * PAGE_TOKENS
        for layer, (cache, group) in enumerate(zip(self.caches, GROUP_OF_LAYER, strict=True)):
            begin = max(forward.begin, first_kept) if group == "swa" else forward.begin
            if begin < forward.end:
                cells = _cells(forward.groups, group, begin, forward.end)
                cache[cells] = data[layer, begin : forward.end]


def _kv_of(request: Request) -> U8:
    """uint8[layer, token, head, k and v]."""
    shape = (len(GROUP_OF_LAYER), len(request.tokens), HEADS, KV_BYTES)
    return np.random.default_rng(request.tag).integers(0, 256, shape, np.uint8)


def _cells(groups: Groups, group: str, begin: int, end: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Block and offset of tokens; the list of "swa" holds the last blocks of the request only."""
    tokens = np.arange(begin, end)
    blocks = np.array(groups[group], np.int64)
    skipped = len(groups["kv"]) - len(blocks)
    return blocks[tokens // PAGE_TOKENS - skipped], tokens % PAGE_TOKENS


def worker_main(pipe: Connection, side: str) -> None:
    """The worker process: calls of the runner by name, until shut_down."""
    runner = Runner(side)
    pipe.send(runner.connector.get_handshake_metadata())
    name = ""
    while name != "shut_down":
        name, args = pipe.recv()
        answer: Any = getattr(runner, name)(*args)
        pipe.send(answer)
