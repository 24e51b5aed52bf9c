"""A decode rank's side of a request, as SGLang's scheduler calls it."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base import KVPoll as SglPoll
from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVTransferDestination

from kvferry.api import KVReceiver
from kvferry.compat.sglang.ends import End
from kvferry.errors import InputError


class KVFerryReceiver(End, BaseKVReceiver):
    """One request's pages, on their way into this rank's pool.

    Attributes:
        abort_notified: SGLang holds the pages until `is_abort_release_safe` of the manager.
        require_staging: False: unequal layouts need no staging buffer.
        bootstrap_infos: SGLang counts acknowledgements by it; kvferry proves quiet without counting.
        prefill_info: the prefill side's grid, once it is known.
    """

    require_staging = False

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        """Open the room; a room number in use fails this request and no other."""
        super().__init__(mgr, bootstrap_room)
        self.abort_notified = False
        self._is_begun = False
        self.bootstrap_infos: list[Any] = []
        self.chunk_staging_infos: list[Any] = []
        self.prefill_info = mgr.prefill_info_table.get(bootstrap_addr)

        def begin() -> None:
            self._opened(KVReceiver(mgr.inner, bootstrap_addr, self.bootstrap_room))

        self._do("opening the room", begin)

    @property
    def _receiver(self) -> KVReceiver:
        assert isinstance(self._room, KVReceiver)
        return self._room

    def init(self, prefill_dp_rank: int) -> None:
        """Begin to find the prefill ranks."""
        self._do("init", lambda: self._receiver.init(int(prefill_dp_rank), tag=self.tag))
        self._is_begun = True

    def poll(self) -> int:
        """The state; pages may be named from `init` on.

        SGLang's schedulers name them before the prefill side knows of the request, and in a recomputation only then ask
        it to begin: to wait for its answer would be to wait for ever.
        """
        state = super().poll()
        if self._is_begun and state == SglPoll.Bootstrapping:
            return int(SglPoll.WaitingForInput)
        return state

    def send_metadata(
        self, kv_indices: Any, aux_index: int | None = None, state_indices: Any = None,
        decode_prefix_len: int | None = None, destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:  # fmt: skip
        """Name the pages."""
        prefix = int(decode_prefix_len or 0)

        def name() -> None:
            if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
                raise InputError(f"destination {destination} is not carried", hint="use the device's pages")
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
