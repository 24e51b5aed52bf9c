"""The canary: a digest of some bytes of a transfer, taken from what was sent and from what landed, and compared.

Both sides look at the same bytes of the same *logical* elements, each through its own layout and its own pages, so a
page of another request, a stale page or exchanged heads differ although every byte "arrived". The sums are taken per
layer and per page of the destination; addition does not depend on order, so that chunks and batches don't matter.

Sampled: 64 bytes in every 4 KiB of each element's bytes, at places that differ from element to element, at least one
place in each element. Full: every byte (the shell hashes the windows of a cell with xxh3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.layout.deal import I64
from kvferry.plan.batch import U64
from kvferry.plan.overlap import Overlap
from kvferry.plan.recent import Recent
from kvferry.plan.route import Leg
from kvferry.plan.small import Size, recipe
from kvferry.plan.table import Table

WINDOW_BYTES = 64
EVERY_BYTES = 4096
BLOCK_WINDOWS = 65_536

MIX = np.uint64(0x9E3779B97F4A7C15)
FOLD = np.uint64(0xD6E8FEB86659FD93)
HALF = np.uint64(32)


class Group(NamedTuple):
    """Elements that are alike in length and granule. Index 0 is the source, 1 the destination.

    Attributes:
        key: int64[K] a mixture of the identity, the same on both sides.
        spread: int64[K] where to look, so that neighbouring layers and heads are looked at elsewhere.
        layer: int64[K] position of the layer among those of the marks.
        base: int64[2, K] address of page 0, granule 0.
        page: int64[2, K] bytes from page to page.
        token: int64[2, K] bytes from granule to granule.
        nbytes: length of a granule.
        granule: tokens of a granule.
    """

    key: I64
    spread: I64
    layer: I64
    base: I64
    page: I64
    token: I64
    nbytes: int
    granule: int


class Marks(NamedTuple):
    """A leg's elements before any merging.

    Attributes:
        layers: int64[L] global layer ids, ascending.
        groups: the elements.
    """

    layers: I64
    groups: tuple[Group, ...]


def marks(table: Table) -> Marks:
    """Group the elements of a leg."""
    layers, position = np.unique(table.layer, return_inverse=True)
    key = mixed(table.key.view(np.uint64))
    groups = []
    for size, tokens in np.unique(np.stack([table.nbytes, table.granule], axis=1), axis=0).tolist():
        some = (table.nbytes == size) & (table.granule == tokens)
        spread = (key[some] >> HALF).view(np.int64)
        bases, pages, granules = (each[:, some] for each in (table.base, table.page, table.token))
        groups.append(Group(key[some].view(np.int64), spread, position[some], bases, pages, granules, size, tokens))
    return Marks(layers, tuple(groups))


class Windows(NamedTuple):
    """Places to look at, in an order that both sides share.

    Attributes:
        offset: int64[N] address of the window, had its page the number 0.
        page: int64[N] which page of this side's page list, counted from the page of slot 0.
        stride: int64[N] bytes from page to page.
        nbytes: length of each window.
        key: uint64[N] what is looked at, the same on both sides.
        layer: int64[N] position in `layers`.
        there: int64[N] page of the destination's page list, counted from the page of slot 0.
    """

    offset: I64
    page: I64
    stride: I64
    nbytes: int
    key: U64
    layer: I64
    there: I64

    def addresses(self, pages: I64, first_page: int) -> I64:
        """int64[N] where the windows lie, given this side's page numbers, from first_page (of slot 0) on."""
        return np.asarray(self.offset + pages[self.page - first_page if first_page else self.page] * self.stride)

    def share(self, number: int, of: int) -> Windows:
        """The part `number` (from 0 on) of `of` parts, the same windows on both sides."""
        low, high = (len(self) * each // of for each in (number, number + 1))
        some = slice(low, high)
        return Windows(
            self.offset[some], self.page[some], self.stride[some], self.nbytes, self.key[some], self.layer[some],
            self.there[some],
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.offset)


class Look(NamedTuple):
    """What one side looks at in one space.

    Attributes:
        layers: int64[L] global layer ids, ascending.
        first_page: the destination's first page that holds a part, counted from the page of slot 0.
        pages: how many pages from there on.
        blocks: groups of windows of equal length, in an order that both sides share; made anew at each iteration
            unless `kept` was called.
    """

    layers: I64
    first_page: int
    pages: int
    blocks: Iterable[Windows]

    def kept(self) -> Look:
        """The same, with all windows made."""
        return self._replace(blocks=tuple(self.blocks))


@dataclass(frozen=True)
class _Blocks:
    """Makes the windows of a request block by block, so that a huge one needs no huge arrays."""

    groups: tuple[Group, ...]
    found: Overlap
    page_tokens: tuple[int, int]
    side: int
    full: bool

    def __iter__(self) -> Iterator[Windows]:
        for group in self.groups:
            for part in _parts(group.nbytes, full=self.full):
                yield from self._of(group, part)

    def _of(self, group: Group, part: _Part) -> Iterator[Windows]:
        counts = -(-self.found.tokens // group.granule)
        total = int(counts.sum())
        every = min(part.every, total)
        turns = max(1, BLOCK_WINDOWS // (len(group.key) * part.blocks))
        ends = np.cumsum(counts)
        for begin in range(0, total, turns * every):
            end = min(total, begin + turns * every)
            yield _windows(group, part, every, begin, self._granules(group.granule, counts, ends, begin, end))

    def _granules(self, granule: int, counts: I64, ends: I64, begin: int, end: int) -> _Granules:
        """Where the granules begin to end of those that move lie."""
        low, high = (int(np.searchsorted(ends, at, side="right")) for at in (begin, end - 1))
        some = slice(low, high + 1)
        first = ends[some] - counts[some]
        repeats = np.minimum(ends[some], end) - np.maximum(first, begin)
        token = np.arange(begin, end) * granule
        src, dst = (
            np.repeat(slots[some] - first * granule, repeats) + token
            for slots in (self.found.src_slot, self.found.dst_slot)
        )
        tokens = self.page_tokens[self.side]
        here = (dst if self.side else src) // tokens
        inside = ((dst if self.side else src) - here * tokens) // granule  # twice as fast as divmod
        return _Granules(here, inside, here if self.side else dst // self.page_tokens[1], self.side)


class _Granules(NamedTuple):
    """int64[N]: page and place in it on this side, page at the destination; and which side this is."""

    here: I64
    inside: I64
    there: I64
    side: int


def look(leg: Leg, lo: int, hi: int, num_tokens: int, side: int, *, full: bool) -> Look:
    """Choose the windows of a request.

    Args:
        leg: of the two ranks' route.
        lo: first position that moves (see `Leg.extent`).
        hi: end of the positions.
        num_tokens: tokens of the request.
        side: 0 for the source, 1 for the destination.
        full: every byte instead of samples.
    """
    seen: Marks = leg.noted("marks", lambda: marks(leg.table))
    found, tokens = leg.overlap(lo, hi, num_tokens), leg.page_tokens
    if not len(found.tokens):
        return Look(seen.layers, 0, 0, ())
    first, last = (int(slot) // tokens[1] for slot in (found.dst_slot.min(), found.dst_slot.max()))
    return Look(seen.layers, first, last - first + 1, _Blocks(seen.groups, found, tokens, side, full))


def small_look(leg: Leg, size: Size, side: int) -> tuple[Look, int] | None:
    """The windows of a small request, made once for all of its size, and the page that this side's list begins with.

    Returns:
        None where nothing moves.

    Raises:
        InputError: the numbers make no request, as in `runs`.
    """
    cooked = recipe(leg, size)
    if cooked is None:
        return None
    kept: Recent[Look] = leg.noted("looks", Recent)
    made = kept.get((size, side), lambda: _small_look(leg, size, side), lambda _: True)
    return made, cooked.first_pages[side]


def _small_look(leg: Leg, size: Size, side: int) -> Look:
    lo, hi = leg.extent(size.prefix_tokens, size.end_tokens, size.rows)
    return look(leg, lo, hi, size.end_tokens, side, full=False).kept()


class _Part(NamedTuple):
    """How windows of one length lie in the granules of an element.

    Attributes:
        nbytes: of a window.
        every: one granule of so many is looked at.
        blocks: windows in such a granule.
        begin: where the first block begins.
        places: how many places, 64 bytes apart, a window may take in its block: a power of two.
    """

    nbytes: int
    every: int
    blocks: int
    begin: int
    places: int


def _parts(granule_bytes: int, *, full: bool) -> list[_Part]:
    whole, rest = divmod(granule_bytes, EVERY_BYTES)
    if full:
        parts = [_Part(EVERY_BYTES, 1, whole, 0, 1), _Part(rest, 1, 1, whole * EVERY_BYTES, 1)]
        return [part for part in parts if part.blocks and part.nbytes]
    size = min(WINDOW_BYTES, granule_bytes)
    if whole:
        return [_Part(size, 1, whole, 0, EVERY_BYTES // WINDOW_BYTES)]
    every = max(1, EVERY_BYTES * size // WINDOW_BYTES // granule_bytes)
    places = 1 << max(1, granule_bytes // WINDOW_BYTES).bit_length() - 1
    return [_Part(size, every, 1, 0, places)]


def _windows(some: Group, part: _Part, every: int, begin: int, granules: _Granules) -> Windows:
    """Elements x granules x blocks, flat."""
    count = len(granules.here)
    turns = np.arange(0, count, every)
    local = (some.spread % every)[:, None] + turns
    if every > 1:  # past the end the last one is looked at twice: no harm, and no holes in the grid
        np.minimum(local, count - 1, out=local)
    ordinal = local + begin
    place = (some.spread[:, None] + 37 * ordinal) & (part.places - 1)
    offset = part.begin + place * WINDOW_BYTES
    at = some.base[granules.side][:, None] + offset + granules.inside[local] * some.token[granules.side][:, None]
    key = (some.key[:, None] + ordinal * 65_537) * 1_000_003 + offset
    page, stride = granules.here[local], some.page[granules.side][:, None]
    columns = [at, page, stride, key, some.layer[:, None], granules.there[local]]
    if part.blocks > 1:
        block = np.arange(part.blocks)
        columns = [column[..., None] for column in columns]
        columns[0] = columns[0] + block * EVERY_BYTES
        columns[3] = columns[3] + block
    shape = (*ordinal.shape, part.blocks) if part.blocks > 1 else ordinal.shape
    at, page, stride, key, layer, there = (np.broadcast_to(column, shape).reshape(-1) for column in columns)
    return Windows(at, page, stride, part.nbytes, mixed(key.view(np.uint64)), layer, there)


def mixed(bits: U64) -> U64:
    """uint64[N]: numbers that look random, the same for the same bits."""
    bits = bits * MIX
    return np.asarray((bits ^ (bits >> HALF)) * FOLD)
