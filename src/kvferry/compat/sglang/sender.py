"""A prefill rank's side of a request, as SGLang's scheduler calls it."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base import KVPoll as SglPoll
from sglang.srt.disaggregation.base.conn import BaseKVSender

from kvferry.api import KVSender
from kvferry.compat.sglang.ends import End


class KVFerrySender(End, BaseKVSender):
    """One request's pages, on their way.

    Attributes:
        supports_host_tensor_indices: False: page numbers come as numpy arrays.
    """

    supports_host_tensor_indices = False

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        """Open the room; a room number in use fails this request and no other."""
        super().__init__(mgr, bootstrap_room)
        self._early_send_wait_event: Any = None
        publish = None if req_has_disagg_prefill_dp_rank else bootstrap_addr

        def begin() -> None:
            self._opened(KVSender(mgr.inner, publish, self.bootstrap_room))

        self._prefix_tokens = 0
        self._do("opening the room", begin)

    @property
    def _sender(self) -> KVSender:
        assert isinstance(self._room, KVSender)
        return self._room

    def pop_decode_prefix_len(self) -> int:
        """Tokens that decode has already, as far as they are whole pages here: SGLang sends from there on."""
        if self._error:
            return 0
        prefix = self._sender.pop_decode_prefix_len()
        self._prefix_tokens = prefix - prefix % int(self.kv_mgr.kv_args.page_size)
        return self._prefix_tokens

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Pages from the decode prefix on, and the metadata row."""
        first = self._prefix_tokens
        self._do(
            "init",
            lambda: self._sender.init(
                int(num_kv_indices), -1 if aux_index is None else int(aux_index), first_token=first,
                num_tokens=self.num_tokens, tag=self.tag,
            ),
        )  # fmt: skip

    def send(
        self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None, indices_event: Any = None
    ) -> None:
        """One chunk; SGLang sends whole pages, the open one with the last chunk."""
        after = indices_event or self._early_send_wait_event
        self._early_send_wait_event = None
        self._do(
            "send",
            lambda: self._sender.send(
                kv_indices, self._state_lists(state_indices, self._prefix_tokens), num_kv_tokens=num_kv_tokens,
                after=after,
            ),
        )  # fmt: skip

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """A last chunk without pages carries state and the metadata row."""
        return num_pages > 0 or last_chunk

    def failure_exception(self) -> None:
        """Raise why the room failed; the schedulers are done with a sender then, and do not clear it."""
        try:
            super().failure_exception()
        finally:
            self.clear()

    def get_max_transfer_tokens(self) -> int | None:
        """No limit: what is large is cut below."""
        return None

    def poll_pp_consensus(self) -> int:
        """The state of all pipeline stages, asked on the first one alone.

        A claim ends when all its sources have delivered or one has failed: the first stage need not ask the others.
        """
        state = self.poll()
        if state != SglPoll.Success or self.kv_mgr.pp_size == 1:
            return state
        success = self._sender.claims_success()
        if success is None:
            return int(SglPoll.Transferring)
        return state if success else int(SglPoll.Failed)
