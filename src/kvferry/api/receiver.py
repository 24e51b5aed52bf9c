"""The decode side of a room."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvferry.api.base import BaseKVReceiver, Indices, StateIndices
from kvferry.api.indices import packed, whole_number
from kvferry.api.lookup import find_ranks
from kvferry.api.room import MAX_TAG, Room
from kvferry.bootstrap import BootstrapClient
from kvferry.errors import InputError, ProtocolError
from kvferry.ids import Side
from kvferry.node.batching import MAIN
from kvferry.node.claims import Target
from kvferry.node.hosts import tcp_endpoint
from kvferry.node.resolver import split_address
from kvferry.proto.effects import ClaimFacts, Kind

if TYPE_CHECKING:
    from kvferry.api.facts import ReceiveFacts
    from kvferry.api.manager import KVManager


class KVReceiver(Room, BaseKVReceiver):
    """One request's pages, on their way into this decode rank's pool."""

    kind = Kind.CLAIM

    def __init__(
        self,
        mgr: KVManager,
        bootstrap_addr: str | None,
        bootstrap_room: int,
        *,
        peers: Sequence[str] | None = None,
    ) -> None:
        """Open the room.

        Args:
            mgr: a manager of the decode side.
            bootstrap_addr: "host:port" of the bootstrap server; None with `peers`.
            bootstrap_room: the room number.
            peers: "host:port" of the prefill ranks' control plane, instead of a bootstrap server.

        Raises:
            RoomInUse: the room has a receiver here that was not cleared.
            InputError: neither or both of bootstrap_addr and peers, or the manager is not of the decode side.
            AddressError: a peer is not host:port.
        """
        mgr.must_be(Side.DECODE, "KVReceiver")
        if (bootstrap_addr is None) == (not peers):
            raise InputError(
                f"decode room {bootstrap_room}: pass either bootstrap_addr ({bootstrap_addr!r}) or peers ({peers!r})"
            )
        if isinstance(peers, (str, bytes)) or (peers is not None and not isinstance(peers, Iterable)):
            raise InputError(f"decode room {bootstrap_room}: peers is {peers!r}", hint="pass a list of addresses")
        self._peers = [_canonical(peer) for peer in peers or ()]
        super().__init__(mgr, bootstrap_room)
        self._bootstrap_addr = bootstrap_addr
        self._begun = False
        self._named = False

    @classmethod
    def from_facts(cls, mgr: KVManager, facts: ReceiveFacts) -> KVReceiver:
        """Open a room and name its pages from what another process (the scheduler half) decided."""
        receiver = cls(mgr, facts.bootstrap_addr, facts.room, peers=facts.peers)
        with receiver.cleared_on_error():
            receiver.init(facts.prefill_dp_rank, tag=facts.tag)
            receiver.send_metadata(
                facts.kv_indices, facts.aux_index, facts.state_indices, facts.decode_prefix_len,
                num_tokens=facts.num_tokens,
            )  # fmt: skip
        return receiver

    def init(self, prefill_dp_rank: int | None = None, *, tag: int = 0) -> None:
        """Begin to find the prefill ranks; see BaseKVReceiver.

        Raises:
            InputError: a negative number.
            ProtocolError: init was called before.
        """
        if self._begun:
            raise ProtocolError(f"room {self.bootstrap_room}: init() was called before")
        side = Side.DECODE.value
        if prefill_dp_rank is not None:
            prefill_dp_rank = whole_number(prefill_dp_rank, "prefill_dp_rank", side)
        tag = whole_number(tag, "tag", side, most=MAX_TAG)
        self._begun = True
        target, node = self._target(prefill_dp_rank), self.kv_mgr.node
        trace = f"{self.bootstrap_room:x}"
        self._open(lambda: node.claims.open(self._view, tag, target, trace))

    def send_metadata(
        self, kv_indices: Indices, aux_index: int | None = None, state_indices: StateIndices = None,
        decode_prefix_len: int = 0, *, num_tokens: int | None = None, tag: int = 0,
    ) -> None:  # fmt: skip
        """Name the pages to fill; see BaseKVReceiver.

        Raises:
            InputError: wrong dtype or shape, a page outside of the pool, a slot that does not exist, a negative
                number, or more or fewer pages, of any space, than num_tokens needs.
            ProtocolError: init was not called, or send_metadata was called before.
        """
        if not self._begun or self._named:
            earlier = "send_metadata() was called before" if self._named else "send_metadata() before init()"
            raise ProtocolError(f"room {self.bootstrap_room}: {earlier}")
        side, spaces = Side.DECODE.value, self.kv_mgr.spaces
        prefix = whole_number(decode_prefix_len, "decode_prefix_len", side)
        if num_tokens is not None:
            num_tokens = whole_number(num_tokens, "num_tokens", side, least=prefix)
        slot = -1 if aux_index is None else whole_number(aux_index, "aux_index", side)
        if slot >= 0:
            self.kv_mgr.node.aux.check(slot, side)
        lists = spaces.lists(kv_indices, state_indices)
        rows = {name: len(numbers) for name, numbers in lists.items() if name != MAIN}
        count = len(lists.get(MAIN, ()))
        tag = whole_number(tag, "tag", side, most=MAX_TAG)
        wants_aux = slot >= 0 and bool(self.kv_mgr.node.aux.slots)
        facts = ClaimFacts(packed(lists), spaces.page_tokens or 1, count, prefix, num_tokens, rows, tag, wants_aux)
        self._check_pages(facts)
        spaces.check_states(f"decode room {self.bootstrap_room}", lists, prefix, num_tokens)
        self.kv_mgr.held.take(self._view, spaces.by_pool(lists))
        self._named = True
        self._post(lambda number: self.kv_mgr.node.claims.metadata(number, facts, slot))

    @staticmethod
    def query_prefill_dp_ranks(
        bootstrap_addr: str, rooms: Sequence[int], *, secret: str | None = None
    ) -> dict[int, int]:
        """Ask the bootstrap server for the DP ranks of many rooms at once; rooms that it does not know are absent.

        Waits for the answer, at most a few seconds; meant for a thread beside the scheduler's.

        Raises:
            BootstrapError: the server can't be reached, or refuses.
        """
        return BootstrapClient(bootstrap_addr, token=secret or os.environ.get("KVFERRY_SECRET")).query_rooms(rooms)

    # -- helpers

    def _target(self, dp_rank: int | None) -> Target:
        if self._peers:
            return Target(addresses=tuple(self._peers))
        address, room, secret = self._bootstrap_addr, self.bootstrap_room, self.kv_mgr.secret
        assert address is not None

        def find() -> list[str]:
            return [entry.endpoint for entry in find_ranks(address, room, dp_rank, secret).entries]

        return Target(find, (address, dp_rank) if dp_rank is not None else None)

    def _check_pages(self, facts: ClaimFacts) -> None:
        spaces, where = self.kv_mgr.spaces, f"decode room {self.bootstrap_room}"
        if facts.num_tokens is not None:
            hint = "the list begins with the page of the first token from decode_prefix_len on that this rank keeps"
            spaces.check_count(where, facts.num_pages, facts.prefix_tokens, facts.num_tokens, hint)
        elif spaces.main is None:
            raise InputError(f"{where}: num_tokens is needed, the layout has no space {MAIN!r} to count it by")
        elif not spaces.page_tokens:
            raise InputError(f"{where}: num_tokens is needed, because this rank keeps only some of the tokens")


def _canonical(peer: str) -> str:
    return tcp_endpoint(*split_address(peer))
