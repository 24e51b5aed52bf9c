"""Canaries: taken at the source while the last chunk is written, compared at the destination before Success.

Small ones are made by whichever thread hands them in (a few numpy calls), large ones by a thread of their own, beside
the copy.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from kvferry.ids import PeerId
from kvferry.layout import list_begin
from kvferry.layout.deal import I64
from kvferry.node.batching import MAIN, numbers
from kvferry.node.memory_reader import check_mapped, read, read_words
from kvferry.plan import SMALL_BYTES as RECIPE_BYTES
from kvferry.plan import Route, Size, recipe
from kvferry.plan.batch import U64
from kvferry.plan.canary import Look, Sums, Windows, add, cells, difference, no_sums, weigh
from kvferry.proto.effects import ClaimFacts, Digest, Verify
from kvferry.wire import Canary

if TYPE_CHECKING:
    from kvferry.node.node import Node

SMALL_BYTES = 1 << 20
BLOCK_BYTES = 4 << 20
"""Most bytes that are gathered at once for a full digest."""

KEPT_BYTES = 1 << 30
"""Claims of at most so many bytes are prepared for; what is kept meanwhile is about 1 % of them."""


@dataclass
class Content:
    """A request's tokens on one side.

    Attributes:
        route: of the two ranks.
        side: 0 for the source, 1 for the destination.
        pages: int32 page indices as raw bytes, per space.
        rows: pages listed per state space at the destination.
        first_token: the token that this side's page list begins with.
        prefix_tokens: tokens that do not move.
        end_tokens: the token after the last one that moves.
        full: every byte is digested, not samples.
        nbytes: how many bytes move.
    """

    route: Route
    side: int
    pages: Mapping[str, bytes]
    rows: Mapping[str, int]
    first_token: int
    prefix_tokens: int
    end_tokens: int
    full: bool
    nbytes: int
    _places: list[Place] | None = None

    def places(self) -> list[Place]:
        """Where to look, per space that moves; raises InputError where the numbers make no request."""
        if self._places is None:
            self._places = [self._place(space) for space in self.route.spaces]
        return self._places

    def prepare(self) -> None:
        """Make all windows, unless they are to be read to the last byte."""
        if not self.full:
            self._places = [place._replace(seen=place.seen.kept()) for place in self.places()]

    def _place(self, space: str) -> Place:
        leg, pages = self.route.leg(space), numbers(self.pages, space)
        rows = self.rows.get(space, 0)
        if self.nbytes <= RECIPE_BYTES and not self.full:
            found = recipe(leg, Size(self.first_token, self.prefix_tokens, self.end_tokens, rows))
            if found is not None:
                return Place(space, found.looks[self.side], pages, found.first_pages[self.side])
        lo, hi = leg.extent(self.prefix_tokens, self.end_tokens, rows)
        mine = (leg.src, leg.dst)[self.side]
        first = list_begin(mine, self.first_token, self.end_tokens, rows) // mine.page_tokens
        return Place(space, leg.look(lo, hi, self.end_tokens, self.side, full=self.full), pages, first)


class Place(NamedTuple):
    """What is looked at in one space, and this side's pages, the first of which is number `first_page` from slot 0."""

    space: str
    seen: Look
    pages: I64
    first_page: int

    def sums(self, *, full: bool) -> Sums:
        """Read this process's memory; raises IndexError where the pages do not hold the tokens."""
        found = no_sums(self.seen)
        for windows in self.seen.blocks:
            addresses = windows.addresses(self.pages, self.first_page)
            values = _hashed(windows, self.seen, addresses) if full else weigh(windows, _words(windows, addresses))
            add(found, self.seen, windows, values)
        return found


def _words(windows: Windows, addresses: I64) -> U64:
    return read_words(addresses, windows.nbytes)


def sent(route: Route, digest: Digest) -> Content:
    """What a link sends, at the source."""
    pages: dict[str, bytes] = {}
    for chunk in digest.chunks:
        for space, data in chunk.pages.items():
            pages[space] = pages.get(space, b"") + data
    rows, prefix = _rows(digest.info.pages), digest.info.prefix_tokens
    return Content(route, 0, pages, rows, digest.first_token, prefix, digest.end_tokens, digest.full, digest.nbytes)


def landed(route: Route, facts: ClaimFacts, nbytes: int, *, full: bool) -> Content:
    """What a claim gets from one source, at the destination."""
    prefix, end = facts.prefix_tokens, facts.end_tokens
    return Content(route, 1, facts.pages, _rows(facts.pages), prefix, prefix, end, full, nbytes)


def _rows(pages: Mapping[str, bytes]) -> dict[str, int]:
    return {space: len(data) // 4 for space, data in pages.items() if space != MAIN}


def canary(content: Content) -> Canary:
    """Take a digest of one side."""
    sums = {place.space: place.sums(full=content.full) for place in content.places()}
    return Canary({name: (each.layers.tobytes(), each.pages.tobytes()) for name, each in sums.items()}, content.full)


def compare(content: Content, theirs: Canary) -> str:
    """Say how what landed differs from what was sent, "" if it does not."""
    for place in content.places():
        there = Sums(*(_numbers(data) for data in theirs.sums.get(place.space, (b"", b""))))
        numbers = place.pages[place.seen.first_page - place.first_page :].tolist()
        text = difference(place.space, place.seen, place.sums(full=content.full), there, numbers)
        if text:
            return text
    return ""


def _numbers(data: bytes) -> U64:
    return np.frombuffer(data[: len(data) // 8 * 8], np.uint64)


def _hashed(windows: Windows, seen: Look, addresses: I64) -> U64:
    """uint64[N]: the xxh3 of each (layer, page) cell, at its first window; 0 elsewhere."""
    order, begins = cells(windows, seen)
    values = np.zeros(len(windows), np.uint64)
    most = max(1, BLOCK_BYTES // windows.nbytes)
    at = 0
    while at < len(begins) - 1:
        end = max(at + 1, int(np.searchsorted(begins, begins[at] + most, side="right")) - 1)
        block = read(addresses[order[begins[at] : begins[end]]], windows.nbytes).view(np.uint8).data
        for cell in range(at, end):
            low, high = (int(begins[each] - begins[at]) * windows.nbytes for each in (cell, cell + 1))
            values[order[begins[cell]]] = xxhash.xxh3_64_intdigest(block[low:high])
        at = end
    return values


class Digests:
    """Tasks, and the threads that do the large ones. All methods may be called from any thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._small: deque[Callable[[], None]] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._expected: dict[tuple[int, PeerId], Content] = {}

    def take(self, route: Route, effect: Digest) -> None:
        """Have a link's canary taken, and the book told."""
        content, job, book = sent(route, effect), effect.job, self._node.book

        def failed(cause: str) -> None:
            self._tell(lambda: book.job_failed(time.monotonic(), job, cause, quiet=True))

        def task() -> None:
            found = canary(content)
            self._tell(lambda: book.job_digested(time.monotonic(), job, found))

        self._post(effect.nbytes, task, failed)

    def expect(self, route: Route, claim: int, peer: PeerId, facts: ClaimFacts, nbytes: int, *, full: bool) -> None:
        """Find out now where to look once the bytes have come, so that it takes no time then."""
        if nbytes <= KEPT_BYTES:
            content = self._expected[claim, peer] = landed(route, facts, nbytes, full=full)
            self._post(nbytes, content.prepare, lambda _: None)

    def forget(self, claim: int, peers: Iterable[PeerId]) -> None:
        """The claim is over."""
        for peer in peers:
            self._expected.pop((claim, peer), None)

    def verify(self, route: Route, effect: Verify) -> None:
        """Have what landed compared, and the book told."""
        key, book = (effect.claim, effect.peer), self._node.book
        content = self._expected.pop(key, None)
        if content is None or content.full != effect.canary.full:
            content = landed(route, effect.facts, effect.nbytes, full=effect.canary.full)
        known = content

        def differs(cause: str) -> None:
            self._tell(lambda: book.verified(time.monotonic(), *key, cause))

        self._post(effect.nbytes, lambda: differs(compare(known, effect.canary)), differs)

    def help(self) -> None:
        """Do the small ones that were posted."""
        while self._small:
            try:
                task = self._small.popleft()
            except IndexError:  # another thread was faster
                return
            task()

    def close(self) -> None:
        """End the threads; what is not done is dropped."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _tell(self, action: Callable[[], None]) -> None:
        self._node.control.call(action)

    def _post(self, nbytes: int, task: Callable[[], None], failed: Callable[[str], None]) -> None:
        def guarded() -> None:
            try:
                check_mapped(self._node.regions)
                task()
            except Exception as error:  # noqa: BLE001 - numbers of a peer, memory of the caller: this room fails
                failed(f"the digest can't be taken: {error}")

        if nbytes <= SMALL_BYTES:
            self._small.append(guarded)
        elif not self._closed:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(2, thread_name_prefix="kvferry-digest")
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._threads.submit(guarded)
