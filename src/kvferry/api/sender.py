"""The prefill side of a room."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.api.base import BaseKVSender, Event, Indices, StateIndices
from kvferry.api.indices import Lists, packed, repeated, whole_number
from kvferry.api.room import MAX_TAG, Room
from kvferry.errors import Code, InputError, ProtocolError
from kvferry.ids import Side
from kvferry.layout import All
from kvferry.node.batching import MAIN
from kvferry.proto.effects import Chunk, Kind, OfferFacts
from kvferry.wire import view_pages

if TYPE_CHECKING:
    from kvferry.api.facts import SendFacts
    from kvferry.api.manager import KVManager


class KVSender(Room, BaseKVSender):
    """One request's pages, on their way from this prefill rank to the decode ranks that claim them."""

    kind = Kind.OFFER

    def __init__(self, mgr: KVManager, bootstrap_addr: str | None, bootstrap_room: int) -> None:
        """Open the room.

        Args:
            mgr: a manager of the prefill side.
            bootstrap_addr: where the room's DP rank is published; None if nobody asks there.
            bootstrap_room: the room number.

        Raises:
            RoomInUse: the room has a sender here that was not cleared.
            InputError: no room number, or the manager is not of the prefill side.
            AddressError: bootstrap_addr is malformed, where the manager has several DP ranks to tell it of.
        """
        mgr.must_be(Side.PREFILL, "KVSender")
        super().__init__(mgr, bootstrap_room)
        self._facts: OfferFacts | None = None
        self._aux_index = -1
        self._pages_sent = 0
        self._named: list[npt.NDArray[np.int32]] = []
        self._chunks = 0
        self._chunks_said = 0
        self._tokens_said = 0
        node = mgr.node
        self._open(lambda: node.open_offer(self._view))
        with self.cleared_on_error():
            mgr.publish_room(bootstrap_addr, self.bootstrap_room)

    @classmethod
    def from_facts(cls, mgr: KVManager, facts: SendFacts) -> KVSender:
        """Open and init a room from what another process (the scheduler half) decided."""
        sender = cls(mgr, facts.bootstrap_addr, facts.room)
        with sender.cleared_on_error():
            sender.init(
                facts.num_kv_indices, facts.aux_index, first_token=facts.first_token, num_tokens=facts.num_tokens,
                tag=facts.tag,
            )  # fmt: skip
        return sender

    def init(
        self, num_kv_indices: int, aux_index: int = -1, *, first_token: int = 0, num_tokens: int | None = None,
        tag: int = 0,
    ) -> None:  # fmt: skip
        """Say what will be sent; see BaseKVSender.

        Raises:
            InputError: a negative size, a slot that does not exist, or tokens that the pages can't hold.
            ProtocolError: init was called before.
        """
        if self._facts is not None:
            raise ProtocolError(f"room {self.bootstrap_room}: init() was called before")
        side = Side.PREFILL.value
        pages = whole_number(num_kv_indices, "num_kv_indices", side)
        first = whole_number(first_token, "first_token", side)
        if num_tokens is not None:
            num_tokens = whole_number(num_tokens, "num_tokens", side, least=first)
        aux_index = whole_number(aux_index, "aux_index", side, least=-1)
        if aux_index >= 0:
            self.kv_mgr.node.aux.check(aux_index, side)
        tag = whole_number(tag, "tag", side, most=MAX_TAG)
        facts = OfferFacts(pages, self.kv_mgr.spaces.page_tokens, first, num_tokens, tag)
        self._check_tokens(facts)
        self._facts, self._aux_index = facts, aux_index
        self._post(lambda number: self._book.init_offer(time.monotonic(), number, facts))

    def send(
        self, kv_indices: Indices, state_indices: StateIndices = None, *, num_kv_tokens: int | None = None,
        after: Event | None = None,
    ) -> None:  # fmt: skip
        """Hand over one chunk; see BaseKVSender. The one that completes num_kv_indices is the last.

        Raises:
            InputError: wrong dtype or shape, a page outside of the pool, state_indices before the last chunk or of
                another length than the request needs, `after` without a query(), or more pages than init declared, or
                one of them twice; in the last two cases the room fails, on both sides.
            ProtocolError: init was not called, or the last chunk was sent before.
        """
        facts = self._facts
        if facts is None:
            raise ProtocolError(f"room {self.bootstrap_room}: send() before init()", hint="say num_kv_indices first")
        lists: Lists = self.kv_mgr.spaces.lists(kv_indices, state_indices)
        count = len(lists.get(MAIN, ()))
        last = self._pages_sent + count == facts.num_pages
        if not last:
            lists = self._without_state(lists, facts.num_pages)
        query = self._query_of(after)
        if last:
            self.kv_mgr.spaces.check_states(
                f"prefill room {self.bootstrap_room}", lists, facts.first_token, facts.num_tokens
            )
        said = self._check_count(facts, count, num_kv_tokens)
        self._check_distinct(lists, last)
        if said is not None:
            self._tokens_said, self._chunks_said = said, self._chunks_said + 1
        chunk = Chunk(self._chunks, self._pages_sent, packed(lists), last)
        aux = self.kv_mgr.node.aux.read(self._aux_index) if last and self._aux_index >= 0 else b""
        if not last:
            self._named.append(view_pages(chunk.pages.get(MAIN, b"")))
        self._pages_sent += count
        self._chunks += 1
        if not self._view.pages_s:
            self._view.pages_s = time.monotonic()
        self._post(lambda number: self.kv_mgr.node.send(number, chunk, aux, query))

    def pop_decode_prefix_len(self) -> int:
        """Tokens that the decode side has already; 0 while it has not said so."""
        return max(0, self._view.prefix_tokens)

    def claims_success(self) -> bool | None:
        """Whether every decode rank that claimed from here got all it wanted, from the other prefill ranks too.

        None while one has not ended. For pipeline stages that must agree without asking each other: the first stage's
        claims end when all stages have delivered, or one has failed.
        """
        return self._view.claims_success

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Whether a chunk is worth a send()."""
        return num_pages > 0 or last_chunk

    # -- helpers

    def _check_tokens(self, facts: OfferFacts) -> None:
        if facts.num_tokens is not None:
            self.kv_mgr.spaces.check_count(
                f"prefill room {self.bootstrap_room}", facts.num_pages, facts.first_token, facts.num_tokens,
                "num_kv_indices counts pages, not tokens, from the page of first_token on",
            )  # fmt: skip
        elif (main := self.kv_mgr.spaces.main) is not None and main.coverage != All():
            raise InputError(
                f"prefill room {self.bootstrap_room}: num_tokens is needed, because of space {main.name!r} only "
                f"the end of a request is kept ({main.coverage})"
            )

    def _check_distinct(self, lists: Lists, last: bool) -> None:
        """Refuse a page that is named twice: it would be right in one place at most."""
        if last and self._named:
            lists = {**lists, MAIN: np.concatenate([*self._named, lists[MAIN]])}
        for pool, numbers in self.kv_mgr.spaces.by_pool(lists).items():
            page = repeated(numbers)
            if page >= 0:
                cause = f"page {page} of space {pool!r} is sent twice"
                self.fail(Code.PAGE_COUNT, cause, "send")
                hint = "the room has failed on both sides; each page of a request is sent once"
                raise InputError(f"prefill room {self.bootstrap_room}: {cause}", hint=hint)

    def _without_state(self, lists: Lists, num_pages: int) -> Lists:
        """The pages of a chunk that is not the last: lists of state spaces come whole, with the last one."""
        if early := sorted(name for name, pages in lists.items() if name != MAIN and len(pages)):
            done = self._pages_sent + len(lists.get(MAIN, ()))
            raise InputError(
                f"prefill room {self.bootstrap_room}: state_indices name {early} with page {done} of {num_pages}",
                hint="pass the whole lists with the chunk that completes num_kv_indices",
            )
        return {name: pages for name, pages in lists.items() if name == MAIN}

    def _query_of(self, after: Event | None) -> Callable[[], bool] | None:
        if after is not None and not callable(getattr(after, "query", None)):
            what = f"prefill room {self.bootstrap_room}: after: {type(after).__name__} has no query()"
            raise InputError(what, hint="pass an event as torch.cuda.Event: query() says whether it has happened")
        return after.query if after is not None else None

    def _check_count(self, facts: OfferFacts, count: int, num_kv_tokens: int | None) -> int | None:
        """Check a chunk's pages; returns the tokens of all chunks so far, if this one says how many it holds."""
        sent = self._pages_sent + count
        if self._chunks and self._pages_sent == facts.num_pages:
            raise ProtocolError(f"room {self.bootstrap_room}: the last of {facts.num_pages} pages was sent before")
        if sent > facts.num_pages:
            cause = f"{sent} pages were sent, init() declared {facts.num_pages}"
            self.fail(Code.PAGE_COUNT, cause, "send")
            raise InputError(f"prefill room {self.bootstrap_room}: {cause}", hint="the room has failed on both sides")
        if num_kv_tokens is not None and facts.page_tokens:
            tokens = whole_number(num_kv_tokens, "num_kv_tokens", Side.PREFILL.value)
            if not (count - 1) * facts.page_tokens < max(tokens, min(count, 1)) <= count * facts.page_tokens:
                raise InputError(
                    f"prefill room {self.bootstrap_room}: {tokens} tokens do not fill {count} pages of "
                    f"{facts.page_tokens} tokens",
                    hint="num_kv_tokens counts the tokens in these pages",
                )
            return self._check_sum(facts, tokens, last=sent == facts.num_pages)
        return None

    def _check_sum(self, facts: OfferFacts, tokens: int, *, last: bool) -> int:
        """The chunks together hold what init() said, where every chunk said how many tokens it holds."""
        said = self._tokens_said + tokens
        begin = facts.first_token // facts.page_tokens * facts.page_tokens
        if last and facts.num_tokens is not None and self._chunks_said == self._chunks:
            expected = facts.num_tokens - begin
            if said != expected:
                raise InputError(
                    f"prefill room {self.bootstrap_room}: the chunks hold {said} tokens, init() said "
                    f"{expected} (num_tokens {facts.num_tokens} from token {begin} on)",
                    hint="num_kv_tokens of the last chunk counts only the tokens that are there",
                )
        return said
