"""`kvferry bench plan`: how fast layouts and page lists become rows, in this process, without an engine.

Memory is not needed: addresses are numbers. Each case makes its plan anew in every repeat, rows included, as the mover
does; the median is reported. What one repeat allocates at most is measured apart, because measuring it is slow.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvferry import config as settings
from kvferry.bench.machine import surroundings
from kvferry.bench.transfer_spec import at_least
from kvferry.layout import Layout, Space, bind, first_slot, num_pages, validate
from kvferry.plan import Election, Limits, PageList, Part, Route, batches, fan_in, route, runs
from kvferry.presets import Block, Grid, Item, ModelShape, attention, layout_of

_DECODE_ADDRESS, _PREFILL_ADDRESS, _BYTES = 1 << 50, 1 << 40, 1 << 50
_PREFIX_TOKENS = 37
_LLAMA = attention("llama-3.1-8b", layers=32, kv_heads=8, head_dim=128)
_DEEPSEEK = ModelShape("deepseek-r1", (Block("kv", tuple(range(61)), (Item("latent", 576),)),))


class PlanSpec(msgspec.Struct, frozen=True):
    """Options of the command.

    Attributes:
        repeats: measured plans per case.
        seed: decides where the pages lie.
    """

    repeats: int = 15
    seed: int = 1


class CaseResult(msgspec.Struct, frozen=True):
    """One case.

    Attributes:
        case: what was planned.
        rows: rows of all batches; 0 where none are made.
        seconds: median of the repeats.
        rows_per_s: rows per second.
        best_s: the fastest repeat.
        peak_bytes: the most memory that one repeat held at once, over what was held before.
    """

    case: str
    rows: int
    seconds: float
    rows_per_s: float
    best_s: float
    peak_bytes: int


class PlanReport(msgspec.Struct, frozen=True):
    """What was measured."""

    spec: PlanSpec
    cases: list[CaseResult]
    machine: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One request between two ranks, the first of each grid.

    Attributes:
        name: for the report.
        model: what travels.
        prefill: grid of the source.
        decode: grid of the destination.
        tokens: of the request.
        prefix_tokens: that decode has already.
    """

    name: str
    model: ModelShape
    prefill: Grid
    decode: Grid
    tokens: int
    prefix_tokens: int = 0


CASES = (
    Case("61 layers x 2048 pages, scattered", _DEEPSEEK, Grid(page=64), Grid(page=64), 2048 * 64),
    Case("TP 4 -> 1 NHD, 4096 pages", _LLAMA, Grid(tp=4), Grid(), 4096 * 16),
    Case("16 -> 64, prefix 37, 128k tokens", _LLAMA, Grid(), Grid(page=64), 1 << 17, _PREFIX_TOKENS),
    Case("interleaved deal, 128k tokens", _LLAMA, Grid(), Grid(dcp=4), 1 << 17),
    Case("interleaved, 16 -> 64, prefix 37", _LLAMA, Grid(), Grid(dcp=4, page=64), 1 << 17, _PREFIX_TOKENS),
)

CONTACT = "first contact, 50,000 pages x 60"


def measure(spec: PlanSpec, say: Callable[[str], None]) -> PlanReport:
    """Run all cases.

    Args:
        spec: options.
        say: takes a line on how far it is.

    Raises:
        InputError: an option has a value that makes no sense.
    """
    at_least("repeats", spec.repeats, 1)
    at_least("seed", spec.seed, 0)
    found = []
    for case in CASES:
        say(case.name)
        found.append(_measured(spec, case.name, _planner(case, spec.seed)))
    say(CONTACT)
    found.append(_measured(spec, CONTACT, _contact()))
    return PlanReport(spec, found, surroundings(settings.load(os.environ)))


def _planner(case: Case, seed: int) -> Callable[[], int]:
    """Makes all rows of a request; returns how many."""
    src, dst = _bound(case.model, case.prefill, _PREFILL_ADDRESS), _bound(case.model, case.decode, _DECODE_ADDRESS)
    path = route(src, dst)
    leg = path.leg("kv")
    random = np.random.default_rng(seed)
    here = _pages(random, leg.src, 0, case.tokens)
    there = _pages(random, leg.dst, case.prefix_tokens, case.tokens)
    part = Part("kv", case.prefix_tokens, case.tokens, here, there)
    return lambda: _rows(path, part)


def _rows(path: Route, part: Part) -> int:
    return sum(len(batch) for batch in batches(path, [runs(path, part)], Limits()))


def _pages(random: np.random.Generator, space: Space, prefix_tokens: int, tokens: int) -> PageList:
    count = num_pages(space, prefix_tokens, tokens)
    numbers = random.permutation(_pool_pages(space.page_tokens))[:count].astype(np.int32)
    return PageList(numbers, first_slot(space, prefix_tokens, tokens))


def _pool_pages(page_tokens: int) -> int:
    return (1 << 17) // page_tokens + 1024


def _bound(model: ModelShape, grid: Grid, address: int, pages: int | None = None) -> Layout:
    count = pages or _pool_pages(grid.page)
    return bind(layout_of(model, grid, grid.ranks()[0], count), [(address, _BYTES)])


def _contact() -> Callable[[], int]:
    """What a decode rank does once for a new peer: read its layout, check it, find the route, elect."""
    model, prefill, decode = attention("m", layers=60, kv_heads=8, head_dim=128), Grid(tp=8), Grid(tp=2, order="hnd")
    said = msgspec.msgpack.encode(_bound(model, prefill, _PREFILL_ADDRESS, 50_000))
    mine = _bound(model, decode, _DECODE_ADDRESS, 50_000)

    def contact() -> int:
        theirs = msgspec.msgpack.decode(said, type=Layout)
        validate(theirs, "prefill", bound=True)
        path = route(theirs, mine)
        fan_in(theirs, [mine])
        Election(mine, [theirs])
        assert not path.is_empty
        return 0

    return contact


def _measured(spec: PlanSpec, name: str, plan: Callable[[], int]) -> CaseResult:
    rows = plan()
    seconds = []
    gc.disable()  # a collection of what other cases left would be counted here
    try:
        for _ in range(spec.repeats):
            begin_s = time.perf_counter()
            plan()
            seconds.append(time.perf_counter() - begin_s)
    finally:
        gc.enable()
    tracemalloc.start()
    plan()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    median_s = statistics.median(seconds)
    return CaseResult(name, rows, median_s, rows / median_s, min(seconds), peak_bytes)
