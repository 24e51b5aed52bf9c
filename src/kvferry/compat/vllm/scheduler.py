"""The scheduler half: which blocks go where. It holds no memory and no connection; no vLLM is imported here."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvferry.api import ReceiveFacts, SendFacts, request_tag
from kvferry.compat.vllm import params as proxy_params
from kvferry.compat.vllm.layouts import CacheGroup, space_name
from kvferry.compat.vllm.orders import Orders, Receive, Send
from kvferry.errors import InputError

log = logging.getLogger("kvferry.vllm")

BlockIds = Sequence[Sequence[int]]
FINISHED = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""States of vLLM's requests in which a token was sampled, so the KV of the whole prompt is there."""


class SchedulerHalf:
    """One engine's scheduler half.

    Attributes:
        endpoints: the control plane of each prefill rank, by rank.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], select: Callable[[BlockIds], BlockIds], *, engine_id: str, role: str
    ) -> None:
        """Start with nothing to do.

        Args:
            groups: the groups whose caches travel.
            select: the block ids of these among those of all groups.
            engine_id: vLLM's name of this engine.
            role: kv_producer, kv_consumer or kv_both.
        """
        self.endpoints: tuple[str, ...] = ()
        self._groups, self._select, self._engine_id = groups, select, engine_id
        self._is_producer, self._is_consumer = role != "kv_consumer", role != "kv_producer"
        # a window ends with the token before the next one: prefill must not go further than the last but one, as
        # decode computes the last one again
        self._left_to_decode = int(any(group.window for group in groups))
        self._next = Orders()
        self._loading: set[str] = set()

    def on_new_request(self, request: Any) -> None:
        """Leave the last prompt token to the decode side, where a cache group keeps a window."""
        params = request.kv_transfer_params
        if not (params and params.get("do_remote_decode") and self._is_producer) or params.get("_shortened"):
            return
        left = request.num_prompt_tokens - self._num_tokens(request.num_prompt_tokens)
        if left and request.prompt_token_ids is not None:
            del request.prompt_token_ids[-left:]
            del request._all_token_ids[-left:]
            request.num_prompt_tokens -= left
            request.max_tokens = 1
            params["_shortened"] = True

    def num_matched(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens a load would bring, and whether it runs beside the steps."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        if not self._is_consumer:
            log.warning("request %s asks for a remote prefill of a kv_producer: computed here", request.request_id)
            return 0, False
        count = max(self._num_tokens(request.num_prompt_tokens) - num_computed_tokens, 0)
        return count, count > 0

    def allocated(self, request: Any, block_ids: BlockIds, num_external_tokens: int) -> None:
        """The request has its blocks."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # one attempt: after a failure, or a preemption, the prompt is computed
        if num_external_tokens:
            blocks = self._select(block_ids)
            self._next.receives[request.request_id] = self._receive(request, blocks, num_external_tokens)
            self._loading.add(request.request_id)
        else:
            self._release(request)

    def loaded(self, request_ids: Iterable[str]) -> None:
        """All ranks have reported these loads, whatever came of them."""
        self._loading.difference_update(request_ids)

    def finished(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must stay, and what the decode side is to be told."""
        if request.request_id in self._loading:  # vLLM keeps the blocks until the worker halves report the load
            self._next.aborts.append(request.request_id)
            return False, None
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and self._is_consumer:  # it ended before it had blocks
            self._release(request)
        wanted = params.get("do_remote_decode") and self._is_producer
        if not wanted or request.status.name not in FINISHED or not self.endpoints:
            return False, None
        room, num_tokens = secrets.randbits(63) or 1, request.num_prompt_tokens
        lists = self._pages(self._select(block_ids), 0, num_tokens)
        main = lists.pop(space_name(0))
        facts = SendFacts(room, len(main), num_tokens=num_tokens, tag=_tag(request, num_tokens))
        self._next.sends[request.request_id] = Send(facts, main, lists)
        return True, proxy_params.answer(
            room, self.endpoints, num_tokens, engine_id=self._engine_id, request_id=request.request_id
        )

    def take_orders(self) -> Orders:
        """What was decided since the last step."""
        orders, self._next = self._next, Orders()
        return orders

    # -- helpers

    def _num_tokens(self, num_prompt_tokens: int) -> int:
        """Tokens that travel of a prompt."""
        return max(num_prompt_tokens - self._left_to_decode, 1)

    def _release(self, request: Any) -> None:
        """Claim nothing of a room, so that prefill need not keep its blocks for a claim to come."""
        order = self._receive(request, [[]] * len(self._groups), 0)
        if order.facts is not None:
            self._next.releases.append(order.facts)

    def _receive(self, request: Any, block_ids: BlockIds, num_external_tokens: int) -> Receive:
        num_tokens = self._num_tokens(request.num_prompt_tokens)
        prefix = num_tokens - num_external_tokens
        lists = self._pages(block_ids, prefix, num_tokens)
        blocks = [block for pages in lists.values() for block in pages]
        try:
            handoff = proxy_params.handoff_of(request.kv_transfer_params, num_tokens)
        except InputError as error:
            return Receive(None, blocks, str(error))
        facts = ReceiveFacts(
            handoff.room_number, lists.pop(space_name(0)), None, lists, prefix, num_tokens, _tag(request, num_tokens),
            peers=tuple(handoff.peers),
        )  # fmt: skip
        return Receive(facts, blocks)

    def _pages(self, block_ids: BlockIds, begin: int, end: int) -> dict[str, list[int]]:
        """The blocks of tokens [begin, end) in each space; vLLM's lists begin with token 0, null blocks included."""
        lists = {}
        for index, (group, blocks) in enumerate(zip(self._groups, block_ids, strict=True)):
            first = max(begin, end - max(group.window - 1, 1)) if group.window else begin
            lists[space_name(index)] = list(blocks[first // group.block_tokens : -(-end // group.block_tokens)])
        return lists


def _tag(request: Any, num_tokens: int) -> int:
    """A tag of the prompt; 0, which checks nothing, where it is not made of tokens."""
    return 0 if request.prompt_token_ids is None else request_tag(request.prompt_token_ids[:num_tokens])
