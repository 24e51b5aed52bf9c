"""The halves of the vLLM connector over numpy memory, in vLLM's order of calls; no vLLM."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ranks import SETTINGS

from kvferry.compat.vllm.layouts import CacheGroup, CacheTensor, Geometry, layout_of
from kvferry.compat.vllm.orders import Orders, Receive
from kvferry.compat.vllm.scheduler import SchedulerHalf
from kvferry.compat.vllm.worker import Results, WorkerHalf
from kvferry.errors import ConfigError

BLOCKS, BLOCK, HEADS, CONTENT, LAYERS, WINDOW = 24, 16, 4, 8, 4, 40
FREE = 0xEEEE
GROUPS = {"full": (CacheGroup(BLOCK),), "hybrid": (CacheGroup(BLOCK), CacheGroup(BLOCK, WINDOW))}


class Engine:
    """One side: a scheduler half, a worker half per rank, and block tables that nobody else has."""

    def __init__(self, role: str, kind: str = "full", ranks: int = 1) -> None:
        self.groups = GROUPS[kind]
        depth = LAYERS // len(self.groups)  # layers of different groups lie on the same memory
        shape = (depth, BLOCKS, HEADS // ranks, BLOCK, CONTENT)
        self.pools = [np.full(shape, FREE, np.uint16) for _ in range(ranks)]
        self.workers = [WorkerHalf(role, {"engine": "local", **SETTINGS}) for _ in range(ranks)]
        geometry = Geometry("m", "uint16", HEADS, CONTENT // 2, 0, ranks, BLOCKS, self.groups)
        group = [layout_of(geometry.at_tp(rank), self._caches(pool)) for rank, pool in enumerate(self.pools)]
        for worker, layout, pool in zip(self.workers, group, self.pools, strict=True):
            worker.register(layout, group, pool)
        self.scheduler = SchedulerHalf(self.groups, lambda block_ids: block_ids, engine_id=role, role=role)
        self.scheduler.endpoints = tuple(worker.endpoint for worker in self.workers)
        self.free = list(range(1, BLOCKS))
        random.Random(role).shuffle(self.free)

    def table(self, num_tokens: int) -> list[list[int]]:
        """Blocks of each group, the null block where a window has none."""
        tables = []
        for group in self.groups:
            count = -(-num_tokens // BLOCK)
            null = max(num_tokens - group.window, 0) // BLOCK if group.window else 0
            tables.append([0] * null + [self.free.pop() for _ in range(count - null)])
        return tables

    def step(self) -> list[Results]:
        orders = self.scheduler.take_orders()
        for worker in self.workers:
            worker.carry_out(orders)
        return [worker.take_results() for worker in self.workers]

    def until(self, name: str, request_id: str) -> list[Results]:
        """Step until all ranks have reported it; returns all reports."""
        reports: list[Results] = []
        deadline = time.monotonic() + 10
        while sum(request_id in getattr(report, name) for report in reports) < len(self.workers):
            assert time.monotonic() < deadline, reports
            reports += self.step()
            time.sleep(0.002)
        return reports

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()

    def _caches(self, pool: Any) -> list[CacheTensor]:
        count = len(self.groups)
        return [
            CacheTensor(f"{layer}", layer * count + group, group, cache.ctypes.data, cache.shape, cache.strides, 2, "f")
            for layer, cache in enumerate(pool)
            for group in range(count)
        ]  # fmt: skip


Make = Callable[..., Engine]


@pytest.fixture
def make(nothing_left_behind: None) -> Iterator[Make]:
    engines: list[Engine] = []

    def begin(*args: Any) -> Engine:
        engines.append(Engine(*args))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def request(num_tokens: int, params: dict[str, Any], seed: int = 0) -> Any:
    tokens = random.Random(seed).choices(range(1000), k=num_tokens)
    return SimpleNamespace(
        request_id=f"r{seed}", kv_transfer_params=params, prompt_token_ids=tokens, _all_token_ids=list(tokens),
        num_prompt_tokens=num_tokens, max_tokens=1, status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )  # fmt: skip


def prefill(engine: Engine, num_tokens: int, seed: int = 0) -> tuple[dict[str, Any], list[list[int]]]:
    """Fill the blocks of a prompt with noise and finish it; returns what decode is told, and the blocks."""
    asked = request(num_tokens, {"do_remote_decode": True}, seed)
    engine.scheduler.on_new_request(asked)
    table = engine.table(asked.num_prompt_tokens)
    noise = np.random.default_rng(seed)
    for pool, block in itertools.product(engine.pools, [block for blocks in table for block in blocks if block]):
        pool[:, block] = noise.integers(0, FREE, pool[:, block].shape, np.uint16)
    stays, params = engine.scheduler.finished(asked, table)
    assert stays
    assert params is not None
    return params, table


def ask(engine: Engine, num_tokens: int, params: dict[str, Any], seed: int = 0, prefix: int = 0) -> list[list[int]]:
    """Admit the request at the decode side; returns its blocks."""
    asked = request(num_tokens, params, seed)
    count, is_async = engine.scheduler.num_matched(asked, prefix)
    assert is_async
    table = engine.table(prefix + count)
    engine.scheduler.allocated(asked, table, count)
    return table


def whole(engine: Engine, block: int) -> Any:
    """[layer, head of the model, token, content] of a block, from all ranks."""
    return np.concatenate([pool[:, block] for pool in engine.pools], axis=1)


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_every_block_of_every_group_is_loaded(make: Make, kind: str, ranks: tuple[int, int]) -> None:
    sender, receiver = make("kv_producer", kind, ranks[0]), make("kv_consumer", kind, ranks[1])
    params, source = prefill(sender, 100)
    target = ask(receiver, 100, params)
    sender.step()
    reports = receiver.until("received", "r0")
    assert not any(report.failed for report in reports)
    pairs = [pair for blocks in zip(source, target, strict=True) for pair in zip(*blocks, strict=True)]
    for there, here in pairs:
        assert (here == 0) == (there == 0)
        if here:
            np.testing.assert_array_equal(whole(receiver, here), whole(sender, there))
    assert (whole(receiver, 0) == FREE).all()
    sender.until("sent", "r0")


def test_blocks_of_the_prefix_are_left_alone(make: Make) -> None:
    sender, receiver = make("kv_producer"), make("kv_consumer")
    params, source = prefill(sender, 100)
    (target,) = ask(receiver, 100, params, prefix=48)
    sender.step()
    receiver.until("received", "r0")
    for number, (there, here) in enumerate(zip(source[0], target, strict=True)):
        if number < 3:
            assert (whole(receiver, here) == FREE).all()
        else:
            np.testing.assert_array_equal(whole(receiver, here), whole(sender, there))
    (data,) = [worker.measures.take() for worker in receiver.workers]
    assert data["load_bytes"] == [4 * LAYERS * HEADS * BLOCK * CONTENT * 2]


def test_a_failed_load_names_its_blocks_once(make: Make) -> None:
    sender, receiver = make("kv_producer"), make("kv_consumer")
    params, _ = prefill(sender, 100)
    (target,) = ask(receiver, 100, params, seed=1)  # another prompt
    sender.step()
    receiver.until("failed", "r1")
    (worker,) = receiver.workers
    assert worker.take_load_errors() == set(target)
    assert worker.take_load_errors() == set()
    assert worker.measures.take()["failures"] == {"load:refused": 1}
    assert (receiver.pools[0] == FREE).all()


def test_an_order_that_cannot_be_carried_out_fails_at_once(make: Make) -> None:
    receiver = make("kv_consumer")
    (worker,) = receiver.workers
    worker.carry_out(Orders(receives={"a": Receive(None, [3, 4], "nonsense")}))
    assert worker.take_results() == Results(received={"a"}, failed={"a"})
    assert worker.take_load_errors() == {3, 4}
    assert worker.measures.take()["failures"] == {"load:input": 1}


def test_an_aborted_load_gives_its_blocks_back(make: Make) -> None:
    sender, receiver = make("kv_producer"), make("kv_consumer")
    params, _ = prefill(sender, 100)
    ask(receiver, 100, params)
    receiver.step()  # the sender does not step: nothing is there to be loaded
    asked = request(100, params)
    receiver.scheduler.finished(asked, [[]])
    assert receiver.until("received", "r0")[-1].failed == {"r0"}
    sender.until("sent", "r0")


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_prompt_whose_request_ends_at_decode_before_it_has_blocks_is_given_back_at_once(
    make: Make, kind: str
) -> None:
    sender, receiver = make("kv_producer", kind), make("kv_consumer", kind)
    params, _ = prefill(sender, 100)
    receiver.scheduler.finished(request(100, params), [[], []])
    deadline = time.monotonic() + 10
    reports = []
    while not any(report.sent for report in reports):
        assert time.monotonic() < deadline
        reports += sender.step()
        assert receiver.step() == [Results()]
    assert sender.workers[0].measures.take()["failures"] == {}


def test_a_prompt_that_nobody_asks_for_is_given_back(make: Make) -> None:
    sender = make("kv_producer")
    prefill(sender, 100)
    sender.until("sent", "r0")
    assert sender.workers[0].measures.take()["failures"] == {"send:no_claim": 1}


def test_a_role_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_role 'kv_nothing' is none of kv_producer, kv_consumer, kv_both"):
        WorkerHalf("kv_nothing", {}).register(None, [], None)  # type: ignore[arg-type]
