"""The picture of `kvferry explain` as numbers: which rectangle of which decode rank's cache comes from whom."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from kvferry.cli.explained import Explained, Line
from kvferry.cli.spans import Part, Range, ranges
from kvferry.ids import Rank

MAX_DRAWN_RUNS = 16
"""Runs of tokens drawn where they lie; more are drawn as one share."""


class Box(NamedTuple):
    """A rectangle that one prefill rank fills.

    Attributes:
        prefill: who fills it.
        left: where it begins, in heads or tokens.
        width: likewise.
        top: number of its first layer among the group's layers.
        height: how many layers.
        is_share: its tokens lie between those of others: only its width has a meaning.
    """

    prefill: Rank
    left: float
    width: float
    top: int
    height: int
    is_share: bool


class Panel(NamedTuple):
    """One decode rank's part of a group."""

    decode: Rank
    boxes: list[Box]


class Group(NamedTuple):
    """What is held alike: a space's fields with the same heads.

    Attributes:
        space: the space.
        fields: the fields.
        layers: layer ids, from the top.
        axis: "heads", "tokens", or "" for a state without heads.
        begin: first head or token.
        end: past the last one.
        tokens: first token that moves and past the last one; (0, 0) of a state.
        panels: one for each decode rank that gets something.
    """

    space: str
    fields: list[str]
    layers: list[int]
    axis: str
    begin: int
    end: int
    tokens: tuple[int, int]
    panels: list[Panel]


class _Piece(NamedTuple):
    line: Line
    part: Part


def groups(found: Explained) -> list[Group]:
    """The groups of all spaces, in the order of the lines."""
    pieces: dict[tuple[str, str], list[_Piece]] = {}
    for line in found.lines:
        for part in line.parts:
            for field in part.fields:
                pieces.setdefault((line.space, field), []).append(_Piece(line, part))
    alike: dict[Hashable, list[tuple[str, str]]] = {}
    for key, held in pieces.items():
        shape = tuple((id(piece.line), tuple(piece.part.layers), tuple(piece.part.heads)) for piece in held)
        alike.setdefault((key[0], shape), []).append(key)
    return [_group(keys[0][0], [field for _, field in keys], pieces[keys[0]]) for keys in alike.values()]


def _group(space: str, fields: list[str], pieces: Sequence[_Piece]) -> Group:
    layers = sorted({layer for piece in pieces for layer in _ids(piece.part.layers)})
    tokens = _hull([span for piece in pieces for span in piece.line.tokens.hull])
    heads = _hull([span for piece in pieces for span in piece.part.heads])
    axis, (begin, end) = ("heads", heads) if heads[1] else ("tokens" if tokens[1] else "", tokens)
    panels: dict[Rank, list[_Piece]] = {}
    for piece in pieces:
        panels.setdefault(piece.line.decode, []).append(piece)
    drawn = [Panel(rank, list(_boxes(mine, layers, tokens))) for rank, mine in panels.items()]
    return Group(space, fields, layers, axis, begin, max(end, begin + 1), tokens, drawn)


def _boxes(pieces: Sequence[_Piece], layers: Sequence[int], tokens: tuple[int, int]) -> Iterator[Box]:
    """The boxes of one panel."""
    number = {layer: index for index, layer in enumerate(layers)}
    cells: dict[Hashable, list[_Piece]] = {}
    for piece in pieces:
        cells.setdefault((tuple(piece.part.layers), tuple(piece.part.heads)), []).append(piece)
    for mine in cells.values():
        is_share = any(line.tokens.runs > MAX_DRAWN_RUNS for line, _ in mine)
        places = _shares(mine, tokens) if is_share else [_places(line, tokens) for line, _ in mine]
        for (line, part), spans in zip(mine, places, strict=True):
            for first, last in ranges(number[layer] for layer in _ids(part.layers)):
                for left, width in _across(part, spans, tokens):
                    yield Box(line.prefill, left, width, first, last - first + 1, is_share)


def _places(line: Line, tokens: tuple[int, int]) -> list[tuple[float, float]]:
    """(begin, length) of a line's runs, in parts of the panel's tokens; a state fills it."""
    size = tokens[1] - tokens[0]
    return [((first - tokens[0]) / size, (last + 1 - first) / size) for first, last in line.tokens.ranges] or [
        (0.0, 1.0)
    ]


def _shares(pieces: Sequence[_Piece], tokens: tuple[int, int]) -> Iterator[list[tuple[float, float]]]:
    """One place for each line, as wide as its share, where all of them together lie."""
    first, end = _hull([span for line, _ in pieces for span in line.tokens.hull])
    size, count = tokens[1] - tokens[0], sum(line.tokens.count for line, _ in pieces)
    begin = float(first - tokens[0])
    for line, _ in pieces:
        length = (end - first) * line.tokens.count / count
        yield [(begin / size, length / size)]
        begin += length


def _across(part: Part, spans: Sequence[tuple[float, float]], tokens: tuple[int, int]) -> Iterator[tuple[float, float]]:
    """(left, width) in the panel's own unit, of parts (begin, length) of the panel's tokens."""
    if not part.heads:
        size = max(tokens[1] - tokens[0], 1)
        yield from ((tokens[0] + begin * size, length * size) for begin, length in spans)
    elif list(spans) == [(0.0, 1.0)]:
        yield from ((first, last - first + 1) for first, last in part.heads)
    else:
        yield from ((head + begin, length) for head in _ids(part.heads) for begin, length in spans)


def _hull(spans: Sequence[Range]) -> tuple[int, int]:
    """From the first to past the last; (0, 0) of nothing."""
    return (min(first for first, _ in spans), max(last for _, last in spans) + 1) if spans else (0, 0)


def _ids(spans: Sequence[Range]) -> list[int]:
    return [each for first, last in spans for each in range(first, last + 1)]
