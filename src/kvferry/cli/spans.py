"""Which layers, heads and tokens two ranks have in common, as ranges and in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from kvferry.layout import Layout, Ranges, Slot, Space, segments
from kvferry.layout.deal import I64
from kvferry.layout.elements import ID_BITS, elements, kinds_of

Range = tuple[int, int]
"""First and last id, both included."""

MAX_RANGES = 64
"""Token ranges that are listed; more are only counted."""
_SHOWN_RANGES = 3
_MASK = (1 << ID_BITS) - 1


class Part(msgspec.Struct, frozen=True):
    """Fields with the same layers and heads.

    Attributes:
        fields: their names.
        layers: layer ids, as ranges.
        heads: head ids, as ranges; [] where there is no head axis.
    """

    fields: list[str]
    layers: list[Range]
    heads: list[Range]


class Tokens(msgspec.Struct, frozen=True):
    """The tokens that a rank sends to another.

    Attributes:
        count: how many; 0 where it is the state of the request.
        runs: runs of consecutive tokens.
        ranges: these runs; [] where there are more than MAX_RANGES.
        hull: from the first to the last of them; [] of a state.
        words: the same for people.
    """

    count: int
    runs: int
    ranges: list[Range]
    hull: list[Range]
    words: str


def common_parts(source: Layout, target: Layout, space: str, fields: Sequence[str]) -> list[Part]:
    """What two ranks both hold of some fields of a space, those that are held alike together."""
    kinds = kinds_of(target)
    keys = np.intersect1d(elements(target, kinds).key, elements(source, kinds).key)
    headed = {(t.space, field.name): field.headed for t in target.tensors for field in t.fields}
    alike: dict[tuple[tuple[Range, ...], tuple[Range, ...]], list[str]] = {}
    for (name, field), number in kinds.items():
        mine = keys[keys >> 2 * ID_BITS == number]
        if name == space and field in fields:
            heads = ranges(mine & _MASK) if headed[name, field] else []
            alike.setdefault((tuple(ranges(mine >> ID_BITS & _MASK)), tuple(heads)), []).append(field)
    return [Part(names, list(layers), list(heads)) for (layers, heads), names in alike.items()]


def unsent_layers(sources: Sequence[Layout], targets: Sequence[Layout]) -> dict[str, list[Range]]:
    """Layers that a destination holds and no source does, by space."""

    def held(layouts: Sequence[Layout]) -> set[tuple[str, int]]:
        return {(tensor.space, layer) for layout in layouts for tensor in layout.tensors for layer in tensor.layers}

    left = held(targets) - held(sources)
    spaces = sorted({space for space, _ in left})
    return {name: ranges(layer for space, layer in left if space == name) for name in spaces}


def common_tokens(src: Space, dst: Space, lo: int, hi: int, num_tokens: int) -> Tokens:
    """The tokens of [lo, hi) that both ranks hold of a request."""
    if isinstance(dst.coverage, Slot):
        return Tokens(0, 1, [], [], "one state")
    start, end = _intersection(src, dst, lo, hi, num_tokens)
    count, listed = int((end - start).sum()), len(start) <= MAX_RANGES
    spans = list(zip(start.tolist(), (end - 1).tolist(), strict=True))
    words = _words(start, end, num_tokens) or f"{count:,}: {_deal(src)}; {_deal(dst)}"
    hull = [(spans[0][0], spans[-1][1])] if spans else []
    return Tokens(count, len(spans), spans if listed else [], hull, words)


def ranges(ids: Iterable[int] | I64) -> list[Range]:
    """Distinct ids as ranges, ascending."""
    found = np.unique(np.fromiter(ids, np.int64))
    parts = np.split(found, np.flatnonzero(np.diff(found) > 1) + 1)
    return [(int(part[0]), int(part[-1])) for part in parts if len(part)]


def in_words(spans: Sequence[Range]) -> str:
    """Ranges as text: "0-3, 7"; of many the first two and the last."""
    texts = [f"{first}-{last}" if last > first else f"{first}" for first, last in spans]
    return ", ".join(texts if len(texts) <= _SHOWN_RANGES else [*texts[:2], f"... {texts[-1]}"])


def _intersection(src: Space, dst: Space, lo: int, hi: int, num_tokens: int) -> tuple[I64, I64]:
    """Starts and ends of the runs that both hold: where the sum of what begins and ends is two."""
    edges, steps = [], []
    for space in (src, dst):
        part = segments(space, lo, max(lo, hi), num_tokens)
        edges += [part.token, part.token + part.length]
        steps += [np.ones(len(part.token)), -np.ones(len(part.token))]
    cuts, place = np.unique(np.concatenate(edges), return_inverse=True)
    both = np.cumsum(np.bincount(place, np.concatenate(steps), len(cuts)))[:-1] == 2
    start, end = cuts[:-1][both], cuts[1:][both]
    apart = start[1:] != end[:-1]
    return start[np.append(True, apart)[: len(start)]], end[np.append(apart, True)[: len(end)]]


def _words(start: I64, end: I64, num_tokens: int) -> str:
    """The runs in words; "" where there are many, and no two alike."""
    length, step = end - start, np.diff(start)
    if len(start) == 1 and length[0] == num_tokens:
        return f"all {num_tokens:,}"
    if len(start) <= _SHOWN_RANGES:
        return in_words(list(zip(start.tolist(), (end - 1).tolist(), strict=True))) or "none"
    if (step == step[0]).all() and (length[:-1] == length[0]).all():
        return f"{length[0]:,} of every {step[0]:,} from {start[0]:,} on"
    return ""


def _deal(space: Space) -> str:
    """A rank's share of a request."""
    deal = space.deal
    if isinstance(deal, Ranges):
        return f"part {', '.join(str(part) for part in deal.owned)} of {deal.parts}"
    if deal.ranks == 1:
        return "all"
    unit = "token" if deal.unit_tokens == 1 else f"unit of {deal.unit_tokens:,}"
    return f"{unit} {deal.rank} mod {deal.ranks}"
