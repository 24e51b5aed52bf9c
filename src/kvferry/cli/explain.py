"""`kvferry explain`: its options read, its answer as tables and JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich import box
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.table import Table

from kvferry.cli.explained import Ask, Choice, Explained, Line, Total
from kvferry.cli.spans import Part, in_words
from kvferry.cli.words import count
from kvferry.errors import InputError
from kvferry.ids import Rank
from kvferry.presets import Grid, find_model, parse_grid

SHOWN_CHOICES = 12
"""Lines about replicas; --json has all."""
_SHOWN_RANKS = 4
_WIDTH = 120
"""Columns where standard output is not a terminal."""


def prepare(
    model: str, decode_model: str | None, prefill: str, decode: str, tokens: int, prefix: int, room: int
) -> Ask:
    """Read the options.

    Raises:
        ConfigError: an unknown model, a grid that is none, numbers out of bounds.
    """
    here = find_model(model)
    there = here if decode_model is None else find_model(decode_model)
    return Ask(here, there, _grid("--prefill", prefill), _grid("--decode", decode), tokens, prefix, room)


def console() -> Console:
    """Standard output; as wide as the tables are where nothing says how wide it is."""
    usual = Console()
    return usual if usual.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDTH)


def as_json(found: Explained, ask: Ask) -> str:
    """One object: the request, and all that was found."""
    request: dict[str, Any] = {
        "model": ask.prefill_model.name, "decode_model": ask.decode_model.name, "tokens": ask.tokens,
        "prefix": ask.prefix, "room": ask.room, "prefill": ask.prefill, "decode": ask.decode,
    }  # fmt: skip
    return msgspec.json.encode(request | msgspec.structs.asdict(found)).decode()


def tables(found: Explained, ask: Ask) -> Iterator[RenderableType]:
    """What moves, the totals of both sides, and what to know about it."""
    here, there = ask.prefill, ask.decode
    yield _headline(found, ask)
    moves = _table("prefill", "decode", "space", "layers", "heads", "tokens", numbers=("bytes", "rows"))
    for line in found.lines:
        moves.add_row(rank_name(line.prefill, here), rank_name(line.decode, there), *_cells(line))
    yield moves
    yield Columns([_totals("prefill", found.sources, here), _totals("decode", found.destinations, there)])
    yield from notes(found, ask)


def notes(found: Explained, ask: Ask) -> Iterator[str]:
    """Sentences below the tables."""
    for choice in found.choices[:SHOWN_CHOICES]:
        yield _choice(choice, ask)
    if left := found.choices[SHOWN_CHOICES:]:
        yield f"... and {count(len(left), 'more such choice')}, see --json"
    for space, layers in found.unsent.items():
        yield f"space {space}, optional layers {in_words(layers)}: no prefill rank holds them, they stay as they are"
    for side, grid in (("prefill", ask.prefill), ("decode", ask.decode)):
        if grid.dp > 1:
            yield f"{side} has {grid.dp} DP groups; a request is served by one of them, and that one is shown"
    yield "rows: entries of the planner's batches, with pages drawn at random from pools of twice the request's size"


def rank_name(rank: Rank, grid: Grid) -> str:
    """A rank by the axes that its side has: "pp1 tp3"."""
    sizes = {"pp": grid.pp, "cp": grid.cp * grid.dcp, "tp": grid.tp}
    return " ".join(f"{axis}{getattr(rank, axis)}" for axis, size in sizes.items() if size > 1) or "rank 0"


def heads_in_words(parts: Sequence[Part]) -> str:
    """The heads of a line; by field where they differ."""
    texts = [in_words(part.heads) or "-" for part in parts]
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"{' '.join(part.fields)} {text}" for part, text in zip(parts, texts, strict=True))


def _grid(option: str, text: str) -> Grid:
    try:
        return parse_grid(text)
    except InputError as error:
        raise InputError(f"{option}: {error.message}", hint=error.hint) from None


def _headline(found: Explained, ask: Ask) -> str:
    tokens = f"{ask.tokens:,} {'token' if ask.tokens == 1 else 'tokens'}"
    kept = f", {ask.prefix:,} of them at the decode side already" if ask.prefix else ""
    ranks = f"from {count(ask.prefill.size, 'prefill rank')} to {count(ask.decode.size, 'decode rank')}"
    return (
        f"{ask.decode_model.name}, a request of {tokens}{kept}: {found.bytes:,} bytes in {found.rows:,} rows, {ranks}, "
        f"room {ask.room}"
    )


def _cells(line: Line) -> tuple[str, ...]:
    layers = in_words(sorted({span for part in line.parts for span in part.layers}))
    numbers = f"{line.bytes:,}", f"{line.rows:,}"
    return (line.space, layers, heads_in_words(line.parts), line.tokens.words, *numbers)


def _table(*words: str, numbers: Sequence[str]) -> Table:
    """A table whose numbers are never cut: words give way, over several lines where they must."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _totals(side: str, totals: Sequence[Total], grid: Grid) -> Table:
    verb = "sends" if side == "prefill" else "gets"
    table = _table(f"{side} rank", numbers=(f"{verb} bytes", "rows"))
    for total in totals:
        table.add_row(rank_name(total.rank, grid), f"{total.bytes:,}", f"{total.rows:,}")
    return table


def _choice(choice: Choice, ask: Ask) -> str:
    here, held = ask.prefill, len(choice.others) + len(choice.spared) + 1
    what = f"{choice.space} ({', '.join(choice.fields)}) for decode {rank_name(choice.decode, ask.decode)}"
    elected = f"room {ask.room} elects {rank_name(choice.elected, here)}"
    text = f"{what}: {held} prefill ranks hold the same; {elected}"
    if choice.others:
        text += f", another room may elect {_names(choice.others, here)}"
    if choice.spared:
        text += f"; {_names(choice.spared, here)} {'serves' if len(choice.spared) == 1 else 'serve'} other decode ranks"
    return text


def _names(ranks: Sequence[Rank], grid: Grid) -> str:
    names = [rank_name(rank, grid) for rank in ranks]
    return ", ".join(names if len(names) <= _SHOWN_RANKS else [*names[:2], f"... {names[-1]}"])
