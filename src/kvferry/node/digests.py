"""Canaries: taken at the source while the last chunk is written, compared at the destination before Success.

Small ones are made by whichever thread hands them in (a few numpy calls), large ones by a thread of their own, beside
the copy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvferry.canary import Look, Sums, Windows, add, cells, difference, look, no_sums, small_look, weigh
from kvferry.errors import InputError
from kvferry.ids import PeerId
from kvferry.layout import list_begin
from kvferry.layout.deal import I64
from kvferry.node.batching import MAIN, numbers
from kvferry.node.memory_reader import Read, read_few, read_many, words
from kvferry.plan import SMALL_BYTES as RECIPE_BYTES
from kvferry.plan import Route, Size
from kvferry.plan.batch import U64
from kvferry.proto.effects import Chunk, ClaimFacts, Digest, Kind, Prepare, Verify
from kvferry.wire import Canary
from kvferry.workers import Workers

if TYPE_CHECKING:
    from kvferry.node.node import Node

SMALL_BYTES = 1 << 20
BLOCK_BYTES = 4 << 20
"""Most bytes that are gathered at once for a full digest."""

FEW_WINDOWS = 1024
"""Of a small request; that is half a millisecond, and can't end the process."""

SHARED_BYTES = 16 << 20
"""Of more bytes two threads read one half each."""

KEPT_BYTES = 1 << 30
"""Claims of at most so many bytes are prepared for; what is kept meanwhile is about 1 % of them."""


@dataclass
class Looks:
    """Where the canary of a request looks on one side, whatever its pages.

    Attributes:
        route: of the two ranks.
        side: 0 for the source, 1 for the destination.
        rows: pages listed per state space at the destination.
        first_token: the token that this side's page list begins with.
        prefix_tokens: tokens that do not move.
        end_tokens: the token after the last one that moves.
        full: every byte is digested, not samples.
        nbytes: how many bytes move.
        pages: this side's page lists by space, where they are known before.
    """

    route: Route
    side: int
    rows: Mapping[str, int]
    first_token: int
    prefix_tokens: int
    end_tokens: int
    full: bool
    nbytes: int
    pages: Mapping[str, bytes] | None = None
    _found: list[tuple[str, Look, int]] | None = None
    _places: list[Place] | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether all windows are made."""
        return self._found is not None

    def prepare(self) -> None:
        """Make all windows, unless all bytes are read or they are too many; of a small request their addresses, too."""
        if not self.full and self.nbytes <= KEPT_BYTES:
            self._found = [(space, seen.kept(), first) for space, seen, first in self._looks()]
            if self.pages is not None and self.nbytes <= SMALL_BYTES:
                self._places = [place.located() for place in self.places(self.pages)]

    def places(self, pages: Mapping[str, bytes]) -> list[Place]:
        """The same with pages; raises InputError where the numbers make no request."""
        if self._places is not None:
            return self._places
        found = self._looks() if self._found is None else self._found
        return [Place(space, seen, numbers(pages, space), first) for space, seen, first in found]

    def _looks(self) -> list[tuple[str, Look, int]]:
        return [(space, *self._look(space)) for space in self.route.spaces]

    def _look(self, space: str) -> tuple[Look, int]:
        leg, rows = self.route.leg(space), self.rows.get(space, 0)
        if self.nbytes <= RECIPE_BYTES and not self.full:
            found = small_look(leg, Size(self.first_token, self.prefix_tokens, self.end_tokens, rows), self.side)
            if found is not None:
                return found
        lo, hi = leg.extent(self.prefix_tokens, self.end_tokens, rows)
        mine = (leg.src, leg.dst)[self.side]
        first = list_begin(mine, self.first_token, self.end_tokens, rows) // mine.page_tokens
        return look(leg, lo, hi, self.end_tokens, self.side, full=self.full), first


class Place(NamedTuple):
    """What is looked at in one space, and this side's pages, the first of which is number `first_page` from slot 0."""

    space: str
    seen: Look
    pages: I64
    first_page: int
    at: tuple[I64, ...] = ()
    """The addresses of each block of windows, where they were worked out before."""

    def located(self) -> Place:
        """The same with all addresses; raises InputError where the pages do not hold the tokens."""
        return self._replace(at=tuple(self._addresses(windows) for windows in self.seen.blocks))

    def sums(self, read: Read, *, full: bool, share: tuple[int, int] = (0, 1)) -> Sums:
        """Read this process's memory, or a share of it; raises InputError where the pages do not hold the tokens."""
        found = no_sums(self.seen)
        for number, whole in enumerate(self.seen.blocks):
            windows = whole.share(*share) if share[1] > 1 else whole
            addresses = self.at[number] if self.at else self._addresses(windows)
            if full:
                values = _hashed(windows, self.seen, addresses, read)
            else:
                values = weigh(windows, words(read(addresses, windows.nbytes), windows.nbytes))
            add(found, self.seen, windows, values)
        return found

    def _addresses(self, windows: Windows) -> I64:
        try:
            return windows.addresses(self.pages, self.first_page)
        except IndexError:
            what = f"page list of space {self.space!r} is too short for the request: its length is {len(self.pages)}"
            raise InputError(what, hint="num_pages() says how many") from None


def sent(route: Route, effect: Digest | Prepare) -> Looks:
    """Of what a link sends, at the source."""
    info = effect.info
    return Looks(
        route.only(info.sends),
        0,
        _rows(info.pages),
        effect.first_token,
        info.prefix_tokens,
        effect.end_tokens,
        effect.full,
        effect.nbytes,
    )


def landed(route: Route, facts: ClaimFacts, nbytes: int, *, full: bool) -> Looks:
    """Of what a claim gets from one source, at the destination; the route is of the spaces that the source sends."""
    prefix = facts.prefix_tokens
    return Looks(route, 1, _rows(facts.pages), prefix, prefix, facts.end_tokens, full, nbytes, facts.pages)


def pages_of(chunks: Sequence[Chunk]) -> dict[str, bytes]:
    """All page lists of an offer, one after the other."""
    first, *more = chunks
    pages = dict(first.pages)
    for chunk in more:
        for space, data in chunk.pages.items():
            pages[space] = pages.get(space, b"") + data
    return pages


def _rows(pages: Mapping[str, bytes]) -> dict[str, int]:
    return {space: len(data) // 4 for space, data in pages.items() if space != MAIN}


def canary(places: Sequence[Place], sums: Sequence[Sums], *, full: bool) -> Canary:
    """The digest of one side, for the other one."""
    named = zip(places, sums, strict=True)
    return Canary({place.space: _raw(each) for place, each in named}, full)


def compare(places: Sequence[Place], sums: Sequence[Sums], theirs: Canary) -> str:
    """Say how what landed differs from what was sent, "" if it does not."""
    for place, mine in zip(places, sums, strict=True):
        if theirs.sums.get(place.space) == _raw(mine):
            continue
        there = Sums(*(_numbers(data) for data in theirs.sums.get(place.space, (b"", b""))))
        numbered = place.pages[place.seen.first_page - place.first_page :].tolist()
        text = difference(place.space, place.seen, mine, there, numbered)
        if text:
            return text
    return ""


def _raw(sums: Sums) -> tuple[bytes, bytes]:
    return sums.layers.tobytes(), sums.pages.tobytes()


def _numbers(data: bytes) -> U64:
    return np.frombuffer(data[: len(data) // 8 * 8], np.uint64)


def _hashed(windows: Windows, seen: Look, addresses: I64, read: Read) -> U64:
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
        self._threads: Workers | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._prepared: dict[tuple[Kind, int], dict[PeerId, Looks]] = {}

    def prepare(self, kind: Kind, number: int, peer: PeerId, looks: Looks) -> None:
        """Find out now where to look when the time has come, so that it takes no time then."""
        self._prepared.setdefault((kind, number), {})[peer] = looks
        self._post(looks.nbytes, looks.prepare, lambda _: None)

    def forget(self, kind: Kind, number: int) -> None:
        """The room is over."""
        self._prepared.pop((kind, number), None)

    def take(self, route: Route, effect: Digest) -> None:
        """Have a link's canary taken, and the book told."""
        job, book, pages = effect.job, self._node.book, pages_of(effect.chunks)
        looks = self._prepared.get((Kind.OFFER, effect.offer), {}).get(effect.peer) or sent(route, effect)

        def failed(cause: str) -> None:
            self._tell(lambda: book.job_failed(time.monotonic(), job, cause, quiet=True))

        def done(places: Sequence[Place], sums: Sequence[Sums]) -> None:
            found = canary(places, sums, full=effect.full)
            self._tell(lambda: book.job_digested(time.monotonic(), job, found))

        self._read(looks, pages, done, failed)

    def verify(self, route: Route, effect: Verify) -> None:
        """Have what landed compared, and the book told."""
        book, theirs = self._node.book, effect.canary
        looks = self._prepared.get((Kind.CLAIM, effect.claim), {}).get(effect.peer)
        if looks is None or looks.full != theirs.full:
            looks = landed(route.only(effect.sends), effect.facts, effect.nbytes, full=theirs.full)

        def differs(cause: str) -> None:
            self._tell(lambda: book.verified(time.monotonic(), effect.claim, effect.peer, cause))

        def done(places: Sequence[Place], sums: Sequence[Sums]) -> None:
            differs(compare(places, sums, theirs))

        self._read(looks, effect.facts.pages, done, differs)

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
        with self._starting:
            self._closed, threads = True, self._threads
        if threads is not None:
            threads.close()

    def _read(
        self,
        looks: Looks,
        pages: Mapping[str, bytes],
        done: Callable[[Sequence[Place], Sequence[Sums]], None],
        failed: Callable[[str], None],
    ) -> None:
        """Read one side, in two shares at once if it is large."""
        if looks.nbytes > SHARED_BYTES and looks.is_prepared:
            shares = _Shares(2, self._reader, done, failed)
            for number in range(2):
                self._post(looks.nbytes, partial(shares.read, looks, pages, (number, 2)), shares.failed)
            return

        def read_all() -> None:
            places = looks.places(pages)
            read = self._reader(looks)
            done(places, [place.sums(read, full=looks.full) for place in places])

        self._post(looks.nbytes, read_all, failed)

    def _reader(self, looks: Looks) -> Read:
        """How to read; raises EngineError where memory is gone."""
        if looks.nbytes <= SMALL_BYTES:
            return self._read_few
        self._node.mapped.check()
        return read_many

    def _read_few(self, addresses: I64, nbytes: int) -> npt.NDArray[np.void]:
        found = read_few(addresses, nbytes) if len(addresses) <= FEW_WINDOWS else None
        if found is None:
            self._node.mapped.check()
            found = read_many(addresses, nbytes)
        return found

    def _tell(self, action: Callable[[], None]) -> None:
        self._node.control.call(action)

    def _post(self, nbytes: int, task: Callable[[], None], failed: Callable[[str], None]) -> None:
        def guarded() -> None:
            try:
                task()
            except Exception as error:  # noqa: BLE001 - numbers of a peer, memory of the caller: this room fails
                failed(f"the digest can't be taken: {error}")
            except BaseException as error:  # a signal handler of the caller's raised in the middle
                failed(f"the digest was interrupted: {type(error).__name__}")
                raise

        if nbytes <= SMALL_BYTES:
            self._small.append(guarded)
        elif (threads := self._workers()) and threads.running:
            threads.submit(guarded)
        elif not self._closed:  # no thread is to be had: it takes the caller's time, and it is done
            self._small.append(guarded)

    def _workers(self) -> Workers | None:
        """The threads, started with the first large task and, where none was to be had, with each one after it."""
        with self._starting:
            if not self._closed and not (self._threads and self._threads.running):
                self._threads = Workers(2, "kvferry-digest")
            return self._threads


class _Shares:
    """What several threads have read of one side; whoever comes last says so, and a failure is said once."""

    def __init__(
        self,
        of: int,
        reader: Callable[[Looks], Read],
        done: Callable[[Sequence[Place], Sequence[Sums]], None],
        failed: Callable[[str], None],
    ) -> None:
        self._lock = threading.Lock()
        self._left = of
        self._sums: list[Sums] | None = None
        self._problem = ""
        self._reader, self._done, self._failed = reader, done, failed

    def read(self, looks: Looks, pages: Mapping[str, bytes], share: tuple[int, int]) -> None:
        """Read a share."""
        places = looks.places(pages)
        read = self._reader(looks)
        found = [place.sums(read, full=looks.full, share=share) for place in places]
        with self._lock:
            if self._sums is not None:
                found = [Sums(a.layers + b.layers, a.pages + b.pages) for a, b in zip(self._sums, found, strict=True)]
            self._sums = found
            self._left -= 1
            last = not self._left
        if last and self._problem:
            self._failed(self._problem)
        elif last:
            self._done(places, found)

    def failed(self, cause: str) -> None:
        """A share could not be read, or nothing could be made of what was read."""
        with self._lock:
            self._problem = self._problem or cause
            self._left -= 1
            last = self._left <= 0
        if last:
            self._failed(self._problem)
