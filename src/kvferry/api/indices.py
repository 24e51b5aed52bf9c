"""Checks of the page indices that schedulers pass: at the call, so that the error has their stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.api.base import Indices, StateIndices
from kvferry.errors import InputError, LayoutError
from kvferry.layout import All, Cyclic, Layout, Rows, Slot, Space, num_pages
from kvferry.layout.deal import canonical
from kvferry.layout.one_pool import pool_names
from kvferry.node.batching import MAIN
from kvferry.wire import pack_pages

Lists = Mapping[str, npt.NDArray[np.int32]]
"""int32[P] page numbers per space."""

FEW_PAGES = 64

NO_POOL = 1 << 31
"""Any page number will do where no page is."""


class PageSpaces:
    """The spaces of a rank's layout, and how many pages each pool has.

    A pipeline stage may have no layer of a space: its scheduler names pages there as all others do, and nothing is done
    with them.
    """

    def __init__(self, layout: Layout, side: str) -> None:
        self.side = side
        self.spaces = {space.name: space for space in layout.spaces}
        if self.main is not None and isinstance(self.main.coverage, Rows):
            raise LayoutError(
                f"{side} space {MAIN!r} has coverage Rows, but kv_indices are pages of tokens",
                hint="give the space another name and pass its rows in state_indices",
            )
        self._pool_of = pool_names(layout)
        self.pages = {
            name: min((tensor.pages for tensor in layout.tensors if tensor.space == name), default=NO_POOL)
            for name in self.spaces
        }

    @property
    def pools(self) -> dict[str, int]:
        """Pages of each pool that there is; spaces that share one have one together."""
        found: dict[str, int] = {}
        for space, pool in self._pool_of.items():
            found[pool] = max(found.get(pool, 0), self.pages[space])
        return found

    def by_pool(self, lists: Lists) -> dict[str, npt.NDArray[np.int32]]:
        """Page lists per space by pool; a space that has none here is left out."""
        pools: dict[str, list[npt.NDArray[np.int32]]] = {}
        for space, pages in lists.items():
            if (pool := self._pool_of.get(space)) is not None:
                pools.setdefault(pool, []).append(pages)
        return {pool: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for pool, arrays in pools.items()}

    @property
    def main(self) -> Space | None:
        """The space of kv_indices, if the layout has one."""
        return self.spaces.get(MAIN)

    @property
    def page_tokens(self) -> int:
        """Tokens per page of the main space; 0 where this rank holds only a share, or the last ones, of the tokens."""
        space = self.main
        whole = space is not None and canonical(space.deal) == Cyclic() and space.coverage == All()
        return space.page_tokens if space is not None and whole else 0

    def check_count(self, what: str, pages: int, from_token: int, num_tokens: int, hint: str) -> None:
        """Raise InputError unless a list of the main space has the pages of tokens [from_token, num_tokens)."""
        space = self.main
        if space is None:
            if pages:
                raise InputError(f"{what}: {pages} pages were given, the layout has no space {MAIN!r}", hint=hint)
            return
        if pages == (needed := num_pages(space, from_token, num_tokens)):
            return
        kept = "" if self.page_tokens else f", of the tokens that this rank keeps ({space.coverage}, {space.deal})"
        raise InputError(
            f"{what}: tokens {from_token} to {num_tokens} need {needed} pages of {space.page_tokens} tokens{kept}, "
            f"{pages} were given",
            hint=hint,
        )

    def check_states(self, where: str, lists: Lists, from_token: int, num_tokens: int | None) -> None:
        """Raise InputError unless each list of another space has the pages of tokens [from_token, num_tokens).

        One that is longer would be taken for another part of the request. Rows are the caller's own; what depends on
        num_tokens is not known without it.
        """
        for name, pages in lists.items():
            space = self.spaces[name]
            depends = not isinstance(space.coverage, Slot)
            if name == MAIN or isinstance(space.coverage, Rows) or (depends and num_tokens is None):
                continue
            needed = num_pages(space, from_token, num_tokens or 0)
            if len(pages) != needed:
                of = f"tokens {from_token} to {num_tokens}" if depends else "a request"
                raise InputError(
                    f"{where}: state_indices[{name!r}] has {len(pages)} pages, {of} needs {needed} of "
                    f"{space.page_tokens} tokens ({space.coverage}, {space.deal})",
                    hint="num_pages() and first_slot() say what a list must hold, and what it begins with",
                )

    def check(self, indices: Indices, space: str, what: str) -> npt.NDArray[np.int32]:
        """The indices as int32.

        Raises:
            InputError: not one-dimensional integers, or outside of the pool.
        """
        where = f"{self.side} {what}"
        try:
            array = np.asarray(indices)
        except (ValueError, TypeError) as error:
            raise InputError(f"{where}: no array of page numbers: {error}", hint="pass a flat list of pages") from None
        if array.size == 0:
            return np.zeros(0, np.int32)
        if array.ndim != 1:
            raise InputError(f"{where}: shape {array.shape} is not one-dimensional", hint="pass a flat list of pages")
        if array.dtype.kind not in "iu":
            raise InputError(f"{where}: dtype {array.dtype} is no integer type", hint="pass int32 or int64")
        low, high = _bounds(array)
        pages = self.pages.get(space, 0)
        if low < 0 or high >= pages:
            bad = low if low < 0 else high
            raise InputError(
                f"{where}: page {bad} is outside of the pool's {pages} pages (space {space!r})",
                hint="pass page numbers, not token slots; see page_tokens of the layout",
            )
        return array.astype(np.int32, copy=False)

    def lists(self, kv_indices: Indices, state: StateIndices) -> dict[str, npt.NDArray[np.int32]]:
        """int32[P] page lists per space, which may be the caller's own memory. Raises InputError."""
        main = self.check(kv_indices, MAIN, "kv_indices")
        found = {MAIN: main} if MAIN in self.spaces else {}
        if state is not None:
            for name, indices in self._named(state).items():
                found[name] = self.check(indices, name, f"state_indices[{name!r}]")
        return found

    def _named(self, state: Mapping[str, Indices] | Sequence[Indices]) -> dict[str, Indices]:
        names = [name for name in self.spaces if name != MAIN]
        if isinstance(state, Mapping):
            unknown = [name for name in state if name not in names]
            if unknown:
                hint = f"the layout's state spaces are {names}"
                raise InputError(f"{self.side} state_indices: unknown space {unknown[0]!r}", hint=hint)
            return dict(state)
        given: Any = state
        if isinstance(given, (str, bytes)) or not hasattr(given, "__len__"):
            what = f"{self.side} state_indices: {given!r} is neither a dictionary nor a list of lists"
            raise InputError(what, hint=f"pass one list for each of {names}")
        if len(state) != len(names):
            raise InputError(
                f"{self.side} state_indices: {len(state)} lists for {len(names)} state spaces",
                hint=f"pass one list for each of {names}, in this order, or a dictionary",
            )
        return dict(zip(names, state, strict=True))


def packed(lists: Lists) -> dict[str, bytes]:
    """The same as they travel, in memory of their own."""
    return {space: pack_pages(pages) for space, pages in lists.items()}


def _bounds(numbers: npt.NDArray[Any]) -> tuple[int, int]:
    if len(numbers) <= FEW_PAGES:  # the call of numpy costs more than all of it
        few = numbers.tolist()
        return min(few), max(few)
    return int(numbers.min()), int(numbers.max())


def repeated(numbers: npt.NDArray[np.int32]) -> int:
    """A page that is named twice; -1 if none is."""
    if len(numbers) <= FEW_PAGES:
        few = numbers.tolist()
        return -1 if len(set(few)) == len(few) else max(few, key=few.count)
    ordered = np.sort(numbers)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    return int(ordered[twice[0]]) if len(twice) else -1


def whole_number(value: object, name: str, side: str, *, least: int = 0, most: int = 2**63 - 1) -> int:
    """An argument as an int. Raises InputError if it is none, below `least` or above `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InputError(f"{side} {name}: {value!r} is no whole number")
    if value < least:
        raise InputError(f"{side} {name}: {int(value)} is below {least}")
    if value > most:
        raise InputError(f"{side} {name}: {int(value)} is above {most}")
    return int(value)
