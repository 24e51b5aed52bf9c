"""What two ranks have in common, element by element, and how neighbours become pieces."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvferry.layout.deal import I64
from kvferry.layout.elements import ID_BITS, Kinds, elements
from kvferry.layout.tensor import Layout
from kvferry.plan.pieces import Pieces


@dataclass(frozen=True)
class Table:
    """Elements of both sides, one column each; index 0 is the source, 1 the destination."""

    key: I64
    base: I64
    block: I64
    page: I64
    token: I64
    nbytes: I64
    granule: I64

    def take(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Table:
        """Some of them."""
        return Table(*(column[..., chosen] for column in vars(self).values()))

    def of_kinds(self, numbers: Collection[int]) -> Table:
        """Those of some (space, field) pairs, by their numbers."""
        return self.take(np.isin(self.key >> 2 * ID_BITS, list(numbers)))

    @property
    def layer(self) -> I64:
        """Global layer ids."""
        return np.asarray(self.key >> ID_BITS & (1 << ID_BITS) - 1)

    def dense(self) -> npt.NDArray[np.bool_]:
        """Which have granules that follow each other on both sides."""
        return np.asarray(np.all(self.nbytes == self.token, axis=0))

    def linear(self, page_tokens: I64) -> npt.NDArray[np.bool_]:
        """Which have granules that follow each other across pages too."""
        page_bytes = self.token * (page_tokens // self.granule)
        return np.asarray(self.dense() & np.all(self.page == page_bytes, axis=0))


def common(src: Layout, dst: Layout, kinds: Kinds) -> Table:
    """What both hold, by key."""
    ours, theirs = elements(src, kinds), elements(dst, kinds)
    keys, i, j = np.intersect1d(ours.key, theirs.key, assume_unique=True, return_indices=True)
    columns = ("base", "block", "page", "token")
    base, block, page, token = (np.stack([getattr(ours, name)[i], getattr(theirs, name)[j]]) for name in columns)
    return Table(keys, base, block, page, token, theirs.nbytes[j], theirs.granule[j])


def pieces_of(table: Table, tokens: tuple[int, int]) -> tuple[tuple[Pieces, ...], tuple[Pieces, ...]]:
    """Join neighbours.

    Args:
        table: the elements of one space.
        tokens: per page, of the source and of the destination.

    Returns:
        What to copy of each token, and what to copy of it where a whole page goes to a whole page (see Leg).
    """
    page_tokens = np.array(tokens)[:, None]
    # with one granule per page the token stride means nothing: let it go on to the next page
    table = replace(table, token=np.where(table.granule == page_tokens, table.page, table.token))
    table = _merged(table)
    by_page = table.take(table.dense() & ~table.linear(page_tokens) & (tokens[0] == tokens[1]))
    whole = replace(
        by_page,
        token=by_page.page,
        nbytes=by_page.nbytes * tokens[1] // by_page.granule,
        granule=np.full_like(by_page.granule, tokens[1]),
    )
    return _grouped(table, page_tokens), _grouped(_merged(whole), page_tokens)


def _merged(table: Table) -> Table:
    """Join elements that are neighbours on both sides, in the same block of memory, and stride alike."""
    table = table.take(np.lexsort((table.base[0], *_strides(table))))
    steps = np.diff(np.concatenate([_strides(table), table.block]), axis=1)
    joined = np.all(steps == 0, axis=0) & np.all(np.diff(table.base) == table.nbytes[:-1], axis=0)
    first = np.flatnonzero(np.append(True, ~joined)[: len(table.nbytes)])
    nbytes = np.add.reduceat(table.nbytes, first) if len(first) else table.nbytes
    return replace(table.take(first), nbytes=nbytes)


def _strides(table: Table) -> I64:
    return np.concatenate([table.page, table.token, table.granule[None]])


def _grouped(table: Table, page_tokens: I64) -> tuple[Pieces, ...]:
    """Split pieces by strides, so that each group is expanded by one formula."""
    kind = np.concatenate([_strides(table), table.dense()[None], table.linear(page_tokens)[None]]).T
    rows, number = np.unique(kind, axis=0, return_inverse=True)
    order = np.argsort(number.reshape(-1), kind="stable")
    members = np.split(order, np.cumsum(np.bincount(number.reshape(-1), minlength=len(rows)))[:-1])
    groups = []
    for row, chosen in zip(rows, members, strict=False):  # of no rows the split makes one empty part
        some = table.take(chosen)
        src_page, dst_page, src_token, dst_token, granule, dense, linear = row.tolist()
        strides = (src_page, dst_page), (src_token, dst_token)
        groups.append(Pieces(some.base, some.nbytes, *strides, granule, bool(dense), bool(linear)))
    return tuple(groups)
