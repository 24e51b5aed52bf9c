"""The route: which bytes two ranks have in common, computed once per pair of peers.

A transfer is the intersection, axis by axis. Layers, fields and heads are intersected here, by identity; what
remains per element is (source base, destination base, length) and four strides. Elements that are neighbours
on both sides are merged into *pieces*; requests add their token runs (see runs), batches multiply the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from kvferry.errors import InputError, LayoutError
from kvferry.ids import Rank
from kvferry.layout.agree import supports
from kvferry.layout.deal import can_meet
from kvferry.layout.elements import ID_BITS, kinds_of
from kvferry.layout.space import Space
from kvferry.layout.tensor import Layout
from kvferry.plan.overlap import Overlap, common_extent, overlap
from kvferry.plan.pattern import Pattern, pattern
from kvferry.plan.pieces import Pieces
from kvferry.plan.recent import Recent
from kvferry.plan.table import Table, common, pieces_of

T = TypeVar("T")

Sends = Mapping[str, Sequence[str]] | None
"""Per space the fields that one source sends; None: all that both ranks have."""

KEPT_RUNS = 4096
"""Where requests of at most so many pages overlap is kept from the join to the plan, and for others of their size."""


@dataclass(frozen=True)
class Leg:
    """A route's part in one space.

    Attributes:
        src: the source's space.
        dst: the destination's space.
        pages: pages in the pool of the source and of the destination.
        pieces: what to copy of each token.
        page_pieces: what to copy where a whole page goes to a whole page, instead of the dense pieces that
            aren't linear: there neighbouring heads, fields and layers are contiguous as well.
        table: the elements one by one.
        fields: the common fields, and their numbers in the table's keys.
    """

    src: Space
    dst: Space
    pages: tuple[int, int]
    pieces: tuple[Pieces, ...]
    page_pieces: tuple[Pieces, ...]
    table: Table
    fields: Mapping[str, int]
    _overlaps: Recent[Overlap] = field(default_factory=lambda: Recent(4), compare=False, repr=False)
    _notes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def overlap(self, lo: int, hi: int, num_tokens: int, *, few: bool = False) -> Overlap:
        """The tokens of [lo, hi) that both sides hold, in runs that lie in one page on each side.

        With `few`, a large request is not cut at its pages: for who only counts, and does not trust the numbers.
        """
        if few and hi - lo > KEPT_RUNS * min(self.src.page_tokens, self.dst.page_tokens):
            return overlap(self.src, self.dst, lo, hi, num_tokens, by_page=False)
        return self._overlaps.get(
            (lo, hi, num_tokens),
            lambda: overlap(self.src, self.dst, lo, hi, num_tokens, by_page=True),
            lambda found: len(found.tokens) <= KEPT_RUNS,
        )

    def most_rows(self, lo: int, hi: int, num_tokens: int) -> int:
        """Rows of the tokens [lo, hi), none of them joined; more than KEPT_RUNS are not counted to the end."""
        if hi - lo > KEPT_RUNS * min(self.page_tokens):
            return KEPT_RUNS + 1
        tokens = self.overlap(lo, hi, num_tokens).tokens
        return sum(
            len(p.nbytes) * (len(tokens) if p.dense else int((-(-tokens // p.granule)).sum())) for p in self.pieces
        )

    def pattern(self, lo: int, hi: int, num_tokens: int) -> Pattern:
        """The rows of the tokens [lo, hi) without their pages."""
        return pattern(self.pieces, self.overlap(lo, hi, num_tokens), self.page_tokens)

    def only(self, fields: Sequence[str]) -> Leg:
        """The same for some fields alone. Raises InputError for one that the ranks do not both have."""
        unknown = set(fields) - set(self.fields)
        if unknown:
            what = f"space {self.dst.name!r}: field {min(unknown)!r} is not held by both ranks"
            raise InputError(what, hint=f"use some of {sorted(self.fields)}")
        if set(fields) == set(self.fields):
            return self
        chosen = {name: self.fields[name] for name in fields}
        return _leg(self.src, self.dst, self.pages, self.table.of_kinds(chosen.values()), chosen)

    @property
    def page_tokens(self) -> tuple[int, int]:
        """Tokens per page at the source and the destination."""
        return self.src.page_tokens, self.dst.page_tokens

    def noted(self, name: str, make: Callable[[], T]) -> T:
        """What somebody once worked out for this leg, kept as long as it."""
        if name not in self._notes:
            self._notes[name] = make()
        return cast("T", self._notes[name])

    @property
    def granule(self) -> int:
        """A request's first token must be a multiple of this: tokens that can't be cut."""
        return math.lcm(*(pieces.granule for pieces in self.pieces))

    def extent(self, prefix_tokens: int, num_tokens: int, rows: int) -> tuple[int, int]:
        """The positions [lo, hi) that both sides cover.

        Raises:
            InputError: the numbers are out of bounds, or the first position lies inside a granule.
        """
        lo, hi = common_extent(self.src, self.dst, prefix_tokens, num_tokens, rows)
        if lo < hi and lo % self.granule:
            what = f"space {self.dst.name!r}: token {lo} is inside a granule of {self.granule}"
            raise InputError(what, hint="a per-page field can't be cut: use a prefix that is a multiple of it")
        return lo, hi


@dataclass(frozen=True)
class Route:
    """All that a source and a destination have in common.

    Attributes:
        src_rank: the source's rank.
        dst_rank: the destination's rank.
        legs: by space name.
    """

    src_rank: Rank
    dst_rank: Rank
    legs: Mapping[str, Leg] = field(default_factory=dict)
    _narrowed: Recent[Route] = field(default_factory=Recent, compare=False, repr=False)

    @property
    def spaces(self) -> tuple[str, ...]:
        """The spaces with common bytes."""
        return tuple(self.legs)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy, whatever the request."""
        return not self.legs

    def leg(self, space: str) -> Leg:
        """The part in one space; raises InputError if the ranks have nothing in common there."""
        if space not in self.legs:
            what = f"space {space!r}: prefill {self.src_rank} and decode {self.dst_rank} have nothing in common"
            raise InputError(what, hint=f"use one of {self.spaces}")
        return self.legs[space]

    def bytes_per_token(self, space: str) -> int:
        """Bytes that move for one token (slot, row); what covers more tokens counts by its share."""
        return sum(-(-int(p.nbytes.sum()) // p.granule) for p in self.leg(space).pieces)

    def only(self, sends: Sends) -> Route:
        """The same with these fields alone; None leaves it as it is.

        Raises:
            InputError: the ranks do not both have one of them.
        """
        if sends is None:
            return self
        return self._narrowed.get(str(sends), lambda: self._only(sends), lambda _: True)

    def _only(self, sends: Mapping[str, Sequence[str]]) -> Route:
        return Route(self.src_rank, self.dst_rank, {space: self.leg(space).only(each) for space, each in sends.items()})

    def request_bytes(
        self, prefix_tokens: int, num_tokens: int, rows: Mapping[str, int] | None = None,
        sends: Sends = None,
    ) -> int:  # fmt: skip
        """Bytes that move for a request.

        Args:
            prefix_tokens: tokens that decode already has.
            num_tokens: tokens of the request.
            rows: number of rows for each space with coverage Rows; 0 where none is given.
            sends: the fields that are sent, per space; None: all.

        Raises:
            InputError: the numbers are out of bounds, or the prefix lies inside a granule.
        """
        total = 0
        for name, leg in self.only(sends).legs.items():
            lo, hi = leg.extent(prefix_tokens, num_tokens, (rows or {}).get(name, 0))
            tokens = leg.overlap(lo, hi, num_tokens, few=True).tokens
            total += sum(int(p.nbytes.sum()) * int((-(-tokens // p.granule)).sum()) for p in leg.pieces)
        return total


def route(src: Layout, dst: Layout) -> Route:
    """Intersect two validated layouts.

    Raises:
        LayoutError: src can't be copied to dst, in the words of `supports`.
    """
    if not (fit := supports(src, dst)):
        raise LayoutError(f"prefill {src.rank} to decode {dst.rank}: {fit.reason}")
    kinds = kinds_of(dst)
    table, legs = common(src, dst, kinds), {}
    for space in dst.spaces:
        fields = {name: number for (each, name), number in kinds.items() if each == space.name}
        chosen = table.of_kinds(fields.values())
        own = next((own for own in src.spaces if own.name == space.name), None)
        if own is not None and len(chosen.key) and can_meet(own.deal, space.deal):
            pages = _pages(src, space.name), _pages(dst, space.name)
            legs[space.name] = _leg(own, space, pages, chosen, fields)
    return Route(src.rank, dst.rank, legs)


def _pages(layout: Layout, space: str) -> int:
    return min(tensor.pages for tensor in layout.tensors if tensor.space == space)


def _leg(src: Space, dst: Space, pages: tuple[int, int], table: Table, fields: Mapping[str, int]) -> Leg:
    pieces, page_pieces = pieces_of(table, (src.page_tokens, dst.page_tokens))
    held = set((table.key >> 2 * ID_BITS).tolist())
    fields = {name: number for name, number in fields.items() if number in held}
    return Leg(src, dst, pages, pieces, page_pieces, table, fields)
