"""The scheduler half of a vLLM-shaped connector and the engine core around it; the worker is another process.

The scheduler half holds no manager, sender or receiver: it turns decisions into SendFacts and ReceiveFacts.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from pools import PAGE_TOKENS, Request
from vllm_worker import (
    BLOCKS,
    Chunk,
    ConnectorMetadata,
    Forward,
    Groups,
    SchedulerOutput,
    WorkerOutput,
    window_start,
    worker_main,
)

from kvferry import ReceiveFacts, SendFacts

Params = dict[str, Any]
ANSWER_LIMIT_S = 20.0


@dataclass
class Running:
    """One request in an engine."""

    req_id: str
    request: Request
    params: Params
    status: str = "waiting"
    groups: Groups = field(default_factory=dict)
    computed: int = 0
    result: Params | None = None

    @property
    def num_blocks(self) -> int:
        return -(-len(self.request.tokens) // PAGE_TOKENS)


class SchedulerHalf:
    """KVConnectorBase_V1 with role SCHEDULER and SupportsHMA, as far as it is used here."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint  # what set_xfer_handshake_metadata brings
        self._next = ConnectorMetadata()
        self._sent_blocks: dict[str, int] = {}
        self._loading: set[str] = set()

    def on_new_request(self, running: Running) -> None:
        if running.params.get("do_remote_decode"):
            running.params.setdefault("room", random.getrandbits(63))

    def get_num_new_matched_tokens(self, running: Running, num_computed_tokens: int) -> tuple[int, bool]:
        if not running.params.get("do_remote_prefill"):
            return 0, False
        return len(running.request.tokens) - num_computed_tokens, True

    def update_state_after_alloc(self, running: Running, num_external_tokens: int) -> None:
        request, params = running.request, running.params
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            prefix = len(request.tokens) - num_external_tokens
            window = running.groups["swa"]
            skipped = max(prefix // PAGE_TOKENS - window_start(len(request.tokens)), 0)
            self._loading.add(running.req_id)
            self._next.receives[running.req_id] = ReceiveFacts(
                params["room"], running.groups["kv"][prefix // PAGE_TOKENS :], None, {"swa": window[skipped:]}, prefix,
                len(request.tokens), request.tag, peers=(params["endpoint"],),
            )  # fmt: skip
        elif params.get("do_remote_decode"):
            self._sent_blocks[running.req_id] = 0
            self._next.sends[running.req_id] = SendFacts(
                params["room"], running.num_blocks, num_tokens=len(request.tokens), tag=request.tag
            )

    def on_preempted(self, running: Running) -> None:
        if self._sent_blocks.pop(running.req_id, None) is not None:
            self._next.preempted.append(running.req_id)

    def build_connector_meta(self, output: SchedulerOutput, req_ids: list[str]) -> ConnectorMetadata:
        for req_id, forward in zip(req_ids, output.forwards, strict=True):
            if req_id in self._sent_blocks:
                self._add_chunk(req_id, forward)
        meta, self._next = self._next, ConnectorMetadata()
        return meta

    def update_connector_output(self, output: WorkerOutput) -> None:
        self._loading -= output.received
        for req_id in output.sent:
            del self._sent_blocks[req_id]

    def request_finished_all_groups(self, running: Running, aborted: bool = False) -> tuple[bool, Params | None]:
        """Whether the blocks have to stay, and what the decode side is to be told."""
        req_id, params = running.req_id, running.params
        if aborted:
            self._next.aborts[req_id] = f"request {req_id} was aborted"
        if req_id not in self._sent_blocks:
            return req_id in self._loading, None
        told = {"do_remote_prefill": True, "do_remote_decode": False}
        return True, None if aborted else {**told, "room": params["room"], "endpoint": self.endpoint}

    def _add_chunk(self, req_id: str, forward: Forward) -> None:
        last = forward.end == len(forward.request.tokens)
        end = len(forward.groups["kv"]) if last else forward.end // PAGE_TOKENS
        begin, self._sent_blocks[req_id] = self._sent_blocks[req_id], end
        if end > begin or last:
            state = {"swa": forward.groups["swa"]} if last else {}
            self._next.chunks[req_id] = Chunk(forward.groups["kv"][begin:end], state)


class Engine:
    """An engine core with one worker process; `step` is one pass of its busy loop."""

    def __init__(self, side: str, token_budget: int = 40) -> None:
        spawn = get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=worker_main, args=(theirs, side), daemon=True)
        self.process.start()
        theirs.close()
        self.connector = SchedulerHalf(self._answer())
        self.token_budget = token_budget
        self.requests: dict[str, Running] = {}
        self.reported: dict[str, Counter[str]] = {"sent": Counter(), "received": Counter()}
        self.reasons: dict[str, str] = {}
        self.free = list(range(1, BLOCKS - 1))  # the first and the last are guards
        random.Random(side).shuffle(self.free)
        self._freed: list[int] = []
        self._finished: set[str] = set()

    # -- what the front end does

    def add(self, req_id: str, request: Request, params: Params) -> Running:
        running = self.requests[req_id] = Running(req_id, request, json.loads(json.dumps(params)))
        self.connector.on_new_request(running)
        return running

    def abort(self, req_id: str) -> None:
        self._finish(self.requests[req_id], aborted=True)

    def preempt(self, req_id: str) -> None:
        """Out of blocks: they go to others in this very step, the request begins anew."""
        running = self.requests[req_id]
        self.connector.on_preempted(running)
        self.free = self._blocks(running) + self.free
        running.groups, running.computed, running.status = {}, 0, "waiting"

    def finish(self, req_id: str) -> None:
        """The last token was generated."""
        self._finish(self.requests[req_id])

    def holds(self, req_id: str) -> bool:
        running = self.requests[req_id]
        return bool(self.call("holds", running.request, running.groups, running.request.decode_prefix))

    # -- the busy loop

    def step(self) -> None:
        for running in [each for each in self.requests.values() if each.status == "waiting"]:
            self._admit(running)
        batch = [each for each in self.requests.values() if each.status == "running"]
        forwards = []
        for running in batch:
            end = min(running.computed + self.token_budget, len(running.request.tokens))
            forwards.append(Forward(running.request, running.groups, running.computed, end))
            running.computed = end
        reused = {block for running in batch for block in self._blocks(running)}
        output = SchedulerOutput(forwards, [block for block in self._freed if block not in reused], self._finished)
        self._freed, self._finished = [], set()
        meta = self.connector.build_connector_meta(output, [running.req_id for running in batch])
        found = self.call("execute_model", output, meta)
        for running in batch:
            if running.computed == len(running.request.tokens):
                self._computed(running)
        self.connector.update_connector_output(found)
        self._update(found)

    def _admit(self, running: Running) -> None:
        prefix = running.request.decode_prefix if running.params.get("do_remote_prefill") else 0
        external, is_async = self.connector.get_num_new_matched_tokens(running, prefix)
        kv, swa = running.num_blocks, running.num_blocks - window_start(len(running.request.tokens))
        taken, self.free = self.free[: kv + swa], self.free[kv + swa :]
        running.groups = {"kv": taken[:kv], "swa": taken[kv:]}
        self.connector.update_state_after_alloc(running, external)
        running.status = "remote" if is_async else "running"

    def _computed(self, running: Running) -> None:
        if running.params.get("do_remote_decode"):
            self._finish(running)  # max_tokens is 1
        else:
            running.status = "recomputed"

    def _update(self, found: WorkerOutput) -> None:
        self.reasons.update(found.reasons)
        self.reported["sent"].update(found.sent)
        self.reported["received"].update(found.received)
        for req_id in found.sent:
            self._release(self.requests[req_id])
        for req_id in found.received:
            running = self.requests[req_id]
            if running.status == "finished":
                self._release(running)
            elif found.load_errors & set(self._blocks(running)):  # kv_load_failure_policy: recompute
                running.status, running.computed = "running", 0
            else:
                running.status, running.computed = "loaded", len(running.request.tokens)

    def _finish(self, running: Running, aborted: bool = False) -> None:
        if running.status == "finished":  # the client of a finished request whose blocks are kept went away
            self.connector.request_finished_all_groups(running, aborted)
            return
        delay_free, running.result = self.connector.request_finished_all_groups(running, aborted)
        running.status = "finished"
        self._finished.add(running.req_id)
        if not delay_free:
            self._release(running)

    def _release(self, running: Running) -> None:
        self._freed += self._blocks(running)
        self.free += self._blocks(running)
        running.groups, running.status = {}, "freed"

    def _blocks(self, running: Running) -> list[int]:
        return [block for group in running.groups.values() for block in group]

    # -- the worker process

    def call(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_LIMIT_S):
            raise TimeoutError(f"the worker process did not answer within {ANSWER_LIMIT_S} s")
        return self._pipe.recv()

    def close(self) -> None:
        try:
            assert self.call("shut_down") == []
        finally:
            self._pipe.close()
            self.process.join(10)
            self.process.close()
