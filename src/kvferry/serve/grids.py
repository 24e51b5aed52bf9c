"""The demo's parallel grids: which ranks each side has, what each holds, and whether the demo can run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvferry.errors import ConfigError, InputError
from kvferry.free_memory import free_memory
from kvferry.ids import Rank, Side
from kvferry.layout import Layout, covers, num_pages, supports, validate
from kvferry.presets import Grid, ModelShape, attention, layout_of, layouts_of, parse_grid
from kvferry.serve.weights import ModelConfig

DEFAULT_GRID = "page=16,order=hnd,arrange=page"
MAX_WORKERS = 24
CACHE_DTYPE = "float16"
SPARE_TOKENS = 128
"""A pool has room for so many tokens more than the request: pages that must stay as they are."""

Found = TypeVar("Found")


def read_grid(text: str, side: Side) -> Grid:
    """Read a side's grid. Raises InputError, naming the side."""
    return _of_side(side, lambda: parse_grid(text))


def rank_names(side: Side, grid: Grid) -> list[str]:
    """How the workers of a side are called: "prefill tp1", or just "prefill" where there is one.

    Only axes of more than one rank are named.
    """
    sizes = grid_sizes(grid)
    axes = [axis for axis in ("pp", "cp", "tp") if getattr(sizes, axis) > 1]
    return [" ".join([side.value, *(f"{axis}{getattr(rank, axis)}" for axis in axes)]) for rank in grid.ranks()]


def grid_sizes(grid: Grid) -> Rank:
    """The size of a grid on each axis, as a manager of the prefill side wants to know it."""
    return Rank(grid.dp, grid.pp, grid.cp * grid.dcp, grid.tp)


def shape_of(name: str, config: ModelConfig) -> ModelShape:
    """What the demo's model keeps of a request; `name` is what both sides call it."""
    return attention(name, layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype=CACHE_DTYPE)


def rank_layouts(model: ModelShape, grid: Grid, num_tokens: int) -> list[Layout]:
    """The unbound layouts of all ranks of a grid, with pools for one request of num_tokens tokens and some more.

    Raises:
        InputError: the grid does not fit the model.
        LayoutError: a dtype is not known.
    """
    spaces = [layout_of(model, grid, rank, pages=1).spaces[0] for rank in grid.ranks()]
    needed = max(num_pages(space, 0, num_tokens) for space in spaces)
    return layouts_of(model, grid, needed + max(2, SPARE_TOKENS // grid.page))


def check_grids(model: ModelShape, prefill: Grid, decode: Grid, num_tokens: int, context_tokens: int) -> None:
    """Check everything that can be wrong with two grids before a process is started.

    Args:
        model: what the model keeps.
        prefill: the grid of the prefill side.
        decode: the grid of the decode side.
        num_tokens: tokens of the prompt.
        context_tokens: tokens of the model's context; no page is larger.

    Raises:
        ConfigError: more ranks than the demo starts, a grid that does not fit the model, or two that do not fit
            each other, in the words of the handshake.
    """
    sides = ((Side.PREFILL, prefill), (Side.DECODE, decode))
    for side, grid in sides:
        _check_one(side, grid, context_tokens)
    if prefill.size + decode.size > MAX_WORKERS:
        raise InputError(
            f"{prefill.size} prefill and {decode.size} decode ranks: the demo starts a process for each, at most "
            f"{MAX_WORKERS}",
            hint="make a grid smaller",
        )
    sources, targets = (_checked(model, side, grid, num_tokens) for side, grid in sides)
    reason = _refusal(sources, targets)
    if reason:
        raise ConfigError(f"--prefill and --decode do not fit together: {reason}")
    if targets[0].dtype != model.dtype:
        raise InputError(f"dtype={targets[0].dtype}: the demo's model keeps {model.dtype}", hint="leave dtype away")


def check_memory(config: ModelConfig, prefill: Grid, num_tokens: int) -> None:
    """Check that all prefill ranks can compute a prompt of num_tokens tokens at the same time.

    Raises:
        InputError: there is not so much memory.
    """
    scores_bytes = 4 * config.heads * num_tokens**2
    cache_bytes = 2 * 2 * config.layers * config.kv_heads * config.head_dim * num_tokens
    needed_bytes = prefill.size * (scores_bytes * 5 // 4 + 4 * cache_bytes)  # measured: 1.2 and 3.5 of them
    free = free_memory()
    if free is not None and needed_bytes > free.nbytes:
        raise InputError(
            f"--prefill: {prefill.size} processes, each of which computes all {num_tokens} tokens of the prompt, "
            f"would take {needed_bytes >> 20:,} MiB; {free.where} has {free.nbytes >> 20:,} MiB free",
            hint="shorten the prompt, or make the grid smaller",
        )


def _check_one(side: Side, grid: Grid, context_tokens: int) -> None:
    if grid.dp > 1:
        raise InputError(
            f"--{side.value}: dp={grid.dp}, but the demo has one request, which one DP group serves",
            hint="leave dp away",
        )
    if grid.page > context_tokens:
        raise InputError(f"--{side.value}: page={grid.page} exceeds the model's context of {context_tokens} tokens")


def _checked(model: ModelShape, side: Side, grid: Grid, num_tokens: int) -> list[Layout]:
    layouts = _of_side(side, lambda: rank_layouts(model, grid, num_tokens))
    for layout in layouts:
        validate(layout, side.value)
    return layouts


def _refusal(sources: Sequence[Layout], targets: Sequence[Layout]) -> str:
    """Why the decode ranks can't be served by the prefill ranks; "" if they can."""
    for target in targets:
        reasons = (supports(source, target).reason for source in sources)
        if reason := next(filter(None, reasons), "") or covers(sources, target):
            return reason
    return ""


def _of_side(side: Side, find: Callable[[], Found]) -> Found:
    """What `find` finds; its error names the side's option."""
    try:
        return find()
    except ConfigError as error:
        raise type(error)(f"--{side.value}: {error.message}", hint=error.hint) from None
