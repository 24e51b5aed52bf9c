"""A decode rank's side of a request, as SGLang's scheduler calls it."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base import KVPoll as SglPoll
from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVTransferDestination

from kvferry.api import KVManager, KVReceiver
from kvferry.compat.sglang.ends import End
from kvferry.errors import InputError


class KVFerryReceiver(End, BaseKVReceiver):
    """One request's pages, on their way into this rank's pool, or into its pool in host memory.

    Where a rank has both, its scheduler chooses when it names the pages: the room is opened then, at the manager of
    the chosen pool, and from `init` on where there is no choice.

    Attributes:
        abort_notified: SGLang holds the pages until `is_abort_release_safe` of the manager.
        require_staging: False: unequal layouts need no staging buffer.
        bootstrap_infos: SGLang counts acknowledgements by it; kvferry proves quiet without counting.
        prefill_info: the prefill side's grid, once it is known.
    """

    require_staging = False

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        """Note the room."""
        super().__init__(mgr, bootstrap_room)
        self.abort_notified = False
        self._bootstrap_addr = bootstrap_addr
        self._prefill_dp_rank: int | None = None
        self.bootstrap_infos: list[Any] = []
        self.chunk_staging_infos: list[Any] = []
        self.prefill_info = mgr.prefill_info_table.get(bootstrap_addr)

    @property
    def _receiver(self) -> KVReceiver:
        assert isinstance(self._room, KVReceiver)
        return self._room

    @property
    def supports_host_destination(self) -> bool:
        """Whether this rank has a pool in host memory; any peer can fill it."""
        return bool(self.kv_mgr.supports_host_destination)

    def init(self, prefill_dp_rank: int) -> None:
        """Begin to find the prefill ranks; a room number in use fails this request and no other."""
        self._prefill_dp_rank = int(prefill_dp_rank)
        if not self.supports_host_destination:
            self._do("init", lambda: self._begin(self.kv_mgr.inner))

    def _begin(self, inner: KVManager) -> None:
        self._opened(KVReceiver(inner, self._bootstrap_addr, self.bootstrap_room))
        self._receiver.init(self._prefill_dp_rank, tag=self.tag)

    def poll(self) -> int:
        """The state; pages may be named from `init` on.

        SGLang's schedulers name them before the prefill side knows of the request, and in a recomputation only then ask
        it to begin: to wait for its answer would be to wait for ever.
        """
        early = SglPoll.Bootstrapping if self._prefill_dp_rank is None else SglPoll.WaitingForInput
        if self._room is None and not self._error and not self._is_aborted:
            return int(early)
        state = super().poll()
        return int(early) if state == SglPoll.Bootstrapping else state

    def send_metadata(
        self, kv_indices: Any, aux_index: int | None = None, state_indices: Any = None,
        decode_prefix_len: int | None = None, destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:  # fmt: skip
        """Name the pages, of the pool that `destination` tells."""
        prefix = int(decode_prefix_len or 0)

        def name() -> None:
            if device_kv_indices is not None:
                raise InputError("pages in two pools at once are not carried", hint="serve without HiSparse")
            if self._room is None:
                self._begin(self.kv_mgr.pool_at(destination))
            self._receiver.send_metadata(
                kv_indices, aux_index, self._state_lists(state_indices, prefix), prefix, num_tokens=self.num_tokens
            )

        self._do("send_metadata", name)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Hold the pages unless it is proven that nothing can land in them any more."""
        del force_arm
        if self._room is not None and not self._room.is_release_safe():
            self.abort_notified = True
            self.kv_mgr.hold(self.bootstrap_room, self._room)

    def abort(self) -> None:
        """End the room; the sources hear it."""
        super().abort()
        self.ensure_abort_notified()

    def is_abort_release_safe(self) -> bool:
        """Whether nothing can land in the pages any more."""
        return self._room is None or self._room.is_release_safe()

    def close_all_sockets(self) -> None:
        """Nothing: sockets belong to the manager."""
