"""The route: which bytes two ranks have in common, computed once per pair of peers.

A transfer is the intersection, axis by axis. Layers, fields and heads are intersected here, by identity; what
remains per element is (source base, destination base, length) and four strides. Elements that are neighbours
on both sides are merged into *pieces*; requests add their token runs (see runs), batches multiply the two.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError, LayoutError
from kvferry.ids import Rank
from kvferry.layout.agree import supports
from kvferry.layout.deal import I64, can_meet
from kvferry.layout.elements import ID_BITS, elements, in_space, kinds_of
from kvferry.layout.space import Space
from kvferry.layout.tensor import Layout
from kvferry.plan.canary import Look, Marks, look, marks
from kvferry.plan.overlap import Overlap, common_extent, overlap
from kvferry.plan.pattern import Pattern, pattern
from kvferry.plan.pieces import Pieces
from kvferry.plan.recent import Recent

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
        marks: the elements one by one, for the canary.
        recipes: what small requests of late had in common with later ones of their size.
    """

    src: Space
    dst: Space
    pages: tuple[int, int]
    pieces: tuple[Pieces, ...]
    page_pieces: tuple[Pieces, ...]
    marks: Marks
    _overlaps: Recent[Overlap] = field(default_factory=lambda: Recent(4), compare=False, repr=False)
    recipes: Recent[Any] = field(default_factory=Recent, compare=False, repr=False)

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

    def pattern(self, lo: int, hi: int, num_tokens: int) -> Pattern:
        """The rows of the tokens [lo, hi) without their pages."""
        return pattern(self.pieces, self.overlap(lo, hi, num_tokens), self.page_tokens)

    @property
    def page_tokens(self) -> tuple[int, int]:
        """Tokens per page at the source and the destination."""
        return self.src.page_tokens, self.dst.page_tokens

    def look(self, lo: int, hi: int, num_tokens: int, side: int, *, full: bool) -> Look:
        """Where the canary of tokens [lo, hi) looks on one side (0 the source, 1 the destination)."""
        return look(self.marks, self.overlap(lo, hi, num_tokens), self.page_tokens, side, full=full)

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

    def only(self, spaces: Collection[str] | None) -> Route:
        """The same in these spaces alone; None leaves it as it is.

        Raises:
            InputError: the ranks have nothing in common in one of the spaces.
        """
        return self if spaces is None else replace(self, legs={space: self.leg(space) for space in spaces})

    def request_bytes(
        self, prefix_tokens: int, num_tokens: int, rows: Mapping[str, int] | None = None,
        spaces: Collection[str] | None = None,
    ) -> int:  # fmt: skip
        """Bytes that move for a request.

        Args:
            prefix_tokens: tokens that decode already has.
            num_tokens: tokens of the request.
            rows: number of rows for each space with coverage Rows; 0 where none is given.
            spaces: in these spaces; None: in all.

        Raises:
            InputError: the numbers are out of bounds, or the prefix lies inside a granule.
        """
        total = 0
        for name, leg in self.only(spaces).legs.items():
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
    table, keys = _common(src, dst)
    legs = {}
    for space in dst.spaces:
        here = in_space(keys, kinds_of(dst), space.name)
        chosen = table.take(here)
        own = next((own for own in src.spaces if own.name == space.name), None)
        if own is not None and len(chosen.nbytes) and can_meet(own.deal, space.deal):
            pages = tuple(_pages(side, space.name) for side in (src, dst))
            legs[space.name] = _leg(own, space, (pages[0], pages[1]), chosen, chosen.marks(keys[here]))
    return Route(src.rank, dst.rank, legs)


@dataclass(frozen=True)
class _Table:
    """Elements of both sides, one column each; index 0 is the source, 1 the destination."""

    base: I64
    block: I64
    page: I64
    token: I64
    nbytes: I64
    granule: I64

    def take(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> _Table:
        return _Table(*(column[..., chosen] for column in vars(self).values()))

    def marks(self, keys: I64) -> Marks:
        layer = keys >> ID_BITS & (1 << ID_BITS) - 1
        return marks(keys, layer, self.base, self.page, self.token, self.nbytes, self.granule)

    def dense(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.all(self.nbytes == self.token, axis=0))

    def linear(self, page_tokens: I64) -> npt.NDArray[np.bool_]:
        page_bytes = self.token * (page_tokens // self.granule)
        return np.asarray(self.dense() & np.all(self.page == page_bytes, axis=0))


def _common(src: Layout, dst: Layout) -> tuple[_Table, I64]:
    kinds = kinds_of(dst)
    ours, theirs = elements(src, kinds), elements(dst, kinds)
    keys, i, j = np.intersect1d(ours.key, theirs.key, assume_unique=True, return_indices=True)
    columns = ("base", "block", "page", "token")
    base, block, page, token = (np.stack([getattr(ours, name)[i], getattr(theirs, name)[j]]) for name in columns)
    return _Table(base, block, page, token, theirs.nbytes[j], theirs.granule[j]), keys


def _pages(layout: Layout, space: str) -> int:
    return min(tensor.pages for tensor in layout.tensors if tensor.space == space)


def _leg(src: Space, dst: Space, pages: tuple[int, int], table: _Table, marks: Marks) -> Leg:
    page_tokens = np.array([[src.page_tokens], [dst.page_tokens]])
    # with one granule per page the token stride means nothing: let it go on to the next page
    table = replace(table, token=np.where(table.granule == page_tokens, table.page, table.token))
    table = _merged(table)
    by_page = table.take(table.dense() & ~table.linear(page_tokens) & (src.page_tokens == dst.page_tokens))
    whole = replace(
        by_page,
        token=by_page.page,
        nbytes=by_page.nbytes * dst.page_tokens // by_page.granule,
        granule=np.full_like(by_page.granule, dst.page_tokens),
    )
    return Leg(src, dst, pages, _grouped(table, page_tokens), _grouped(_merged(whole), page_tokens), marks)


def _merged(table: _Table) -> _Table:
    """Join elements that are neighbours on both sides, in the same block of memory, and stride alike."""
    table = table.take(np.lexsort((table.base[0], *_strides(table))))
    steps = np.diff(np.concatenate([_strides(table), table.block]), axis=1)
    joined = np.all(steps == 0, axis=0) & np.all(np.diff(table.base) == table.nbytes[:-1], axis=0)
    first = np.flatnonzero(np.append(True, ~joined)[: len(table.nbytes)])
    nbytes = np.add.reduceat(table.nbytes, first) if len(first) else table.nbytes
    return replace(table.take(first), nbytes=nbytes)


def _strides(table: _Table) -> I64:
    return np.concatenate([table.page, table.token, table.granule[None]])


def _grouped(table: _Table, page_tokens: I64) -> tuple[Pieces, ...]:
    """Split pieces by strides, so that each group is expanded by one formula."""
    kind = np.concatenate([_strides(table), table.dense()[None], table.linear(page_tokens)[None]]).T
    groups = []
    for row in np.unique(kind, axis=0):
        some = table.take(np.all(kind == row, axis=1))
        src_page, dst_page, src_token, dst_token, granule, dense, linear = row.tolist()
        strides = (src_page, dst_page), (src_token, dst_token)
        groups.append(Pieces(some.base, some.nbytes, *strides, granule, bool(dense), bool(linear)))
    return tuple(groups)
