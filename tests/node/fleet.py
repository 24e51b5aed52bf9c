"""Whole sides of any grid, every rank a manager over memory with guards, and rooms between them; the oracle judges."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvferry import KVArgs, KVClassType, KVPoll, KVReceiver, KVSender, get_kv_class
from kvferry.layout import Layout
from kvferry.plan import PageList
from kvferry.testing.oracle import Memory, cells, pages_of

FAST = {"bootstrap_timeout_s": 10.0, "claim_timeout_s": 10.0, "stall_s": 10.0, "drain_limit_s": 2.0}
MAIN = "kv"


@dataclass
class Rank:
    """One manager, its memory, and which of its pages are free."""

    memory: Memory
    aux: np.ndarray
    manager: object
    free: dict[str, list[int]] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return self.memory.layout

    def take(self, first_token, num_tokens, rows):
        """A page list per space for tokens [first_token, num_tokens), from pages that nobody has."""
        lists = {}
        for space in self.layout.spaces:
            logical = pages_of(space, first_token, num_tokens, rows)
            chosen = [self.free[space.name].pop() for _ in logical]
            first = logical[0] * space.page_tokens if logical else 0
            lists[space.name] = PageList(np.array(chosen, np.int32), first)
        return lists


class Fleet:
    """Both sides."""

    def __init__(self, prefill, decode, **settings):
        self.prefill = [self._rank("prefill", layout, (), settings) for layout in prefill]
        self.decode = [
            self._rank("decode", layout, [other for other in decode if other.rank.dp == layout.rank.dp], settings)
            for layout in decode
        ]

    def between(self, prefill_dp, decode_dp):
        """The same ranks, as far as they are of these DP groups."""
        found = object.__new__(Fleet)
        found.prefill = [rank for rank in self.prefill if rank.layout.rank.dp == prefill_dp]
        found.decode = [rank for rank in self.decode if rank.layout.rank.dp == decode_dp]
        return found

    @staticmethod
    def _rank(side, layout, group, settings):
        memory, aux = Memory(layout), np.zeros((8, 2), np.int64)
        manager = get_kv_class("local", KVClassType.MANAGER)
        made = manager(KVArgs(memory.layout, (), [aux], group), side, environ={}, **{**FAST, **settings})
        rank = Rank(memory, aux, made)
        for space in layout.spaces:
            pages = min((tensor.pages for tensor in layout.tensors if tensor.space == space.name), default=4096)
            rank.free[space.name] = np.random.default_rng(pages).permutation(pages).tolist()
        return rank

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in (*self.decode, *self.prefill):
            rank.manager.shutdown()

    def hand_over(self, room, num_tokens, *, prefix=0, first_token=0, chunk_pages=1000, rows=0, more=()):
        """One request from all prefill to all decode ranks, told `more` addresses too; returns the bytes they got."""
        senders = [self._send(rank, room, num_tokens, first_token, chunk_pages, rows) for rank in self.prefill]
        endpoints = [rank.manager.endpoint for rank in self.prefill] + list(more)
        receivers = [self._receive(rank, endpoints, room, num_tokens, prefix, rows) for rank in self.decode]
        for each in (*receivers, *senders):
            assert each.wait(20) is KVPoll.Success, each.failure()
        total = sum(receiver.get_transfer_metric().transfer_total_bytes for receiver in receivers)
        for each in (*receivers, *senders):
            each.clear()
        return total

    def _send(self, rank, room, num_tokens, first_token, chunk_pages, rows):
        lists = rank.take(first_token, num_tokens, rows)
        held = cells(rank.layout, lists, first_token, num_tokens, rows)
        rank.memory.expect(held, held)
        rank.memory.write(held)
        rank.held = held
        rank.aux[1] = (room, 4711)
        main = lists.get(MAIN, PageList(np.zeros(0, np.int32))).indices
        state = {name: given.indices for name, given in lists.items() if name != MAIN}
        sender = KVSender(rank.manager, None, room)
        sender.init(len(main), 1, first_token=first_token, num_tokens=num_tokens, tag=room)
        chunks = [main[at : at + chunk_pages] for at in range(0, len(main), chunk_pages)] or [main]
        for chunk in chunks[:-1]:
            sender.send(chunk)
        sender.send(chunks[-1], state)
        return sender

    def _receive(self, rank, endpoints, room, num_tokens, prefix, rows):
        lists = rank.take(prefix, num_tokens, rows)
        wanted = cells(rank.layout, lists, prefix, num_tokens, rows)
        for source in self.prefill:
            rank.memory.expect(wanted, source.held)
        rank.wanted = wanted
        receiver = KVReceiver(rank.manager, None, room, peers=endpoints)
        receiver.init(tag=room)
        main = lists.get(MAIN, PageList(np.zeros(0, np.int32))).indices
        state = {name: given.indices for name, given in lists.items() if name != MAIN}
        receiver.send_metadata(main, 2, state, prefix, num_tokens=num_tokens)
        return receiver

    def check(self, room):
        """Every byte of every rank, and the metadata row."""
        for rank in self.decode:
            assert rank.memory.differences(rank.wanted) == "", rank.layout.rank
            assert rank.aux[2].tolist() == [room, 4711], (rank.layout.rank, rank.aux.tolist())
        for rank in self.prefill:
            assert rank.memory.differences(rank.held) == "", rank.layout.rank

    def held_bytes(self):
        """What the last request holds of the decode side's memory: each byte once."""
        return sum(nbytes for rank in self.decode for _, nbytes in rank.wanted.values())
