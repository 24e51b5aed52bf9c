"""A rank's manager, as SGLang's schedulers make and poke it."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVManager, KVTransferDestination
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_serving

from kvferry.api import KVArgs, KVClassType, get_kv_class
from kvferry.api.room import Room
from kvferry.bootstrap.address import join_address
from kvferry.compat.sglang.geometry import Geometry, geometry_of
from kvferry.compat.sglang.layouts import host_args, layout_of
from kvferry.compat.sglang.states import States
from kvferry.compat.sglang.topology import PrefillTable
from kvferry.errors import InputError
from kvferry.ids import Side

log = logging.getLogger("kvferry.sglang")

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - a rank reaches a wildcard bind of its own host so


class KVFerryManager(BaseKVManager):
    """One rank. What SGLang's schedulers read of a manager is here; all work is done by `inner`.

    Attributes:
        inner: kvferry's own manager.
        host: a decode rank's manager of its pool in host memory, where SGLang may receive into it.
        kv_args: SGLang's KVArgs.
        prefill_info_table: bootstrap address -> SGLang's PrefillServerInfo.
    """

    engine_name = "local"
    supports_deferred_decode_kv_release = True
    is_dummy_cp_rank = False
    enable_all_cp_ranks_for_transfer = False

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        """Translate, register memory, and on the prefill side register at the bootstrap server.

        Raises:
            ConfigError (LayoutError, AddressError, ...): what can't be carried, by name; the server does not start.
        """
        self.kv_args, self.server_args, self.disaggregation_mode = args, server_args, disaggregation_mode
        self.is_mla_backend = bool(is_mla_backend)
        is_latent = self.is_mla_backend or bool(getattr(args, "is_hybrid_mla_backend", False))
        self.geometry = geometry_of(args, server_args, is_mla=is_latent)
        self.pp_size = self.geometry.sizes.pp
        self.attn_cp_rank, self.attn_cp_size = self.geometry.rank.cp, self.geometry.sizes.cp
        self.states = States(args.state_types, args.page_size)
        self.enable_deferred_decode_kv_release = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()
        self.request_status: dict[int, int] = {}
        self.transfer_infos: dict[int, Any] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self._held: dict[int, Room] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._executor_lock = threading.Lock()
        side = Side(disaggregation_mode.value)
        self.inner = self._open(side, args, self.geometry)
        self.host = self._open_host(side, args)
        self.prefills = PrefillTable(self.inner.secret)

    @property
    def prefill_info_table(self) -> dict[str, Any]:
        """Bootstrap address -> what is known of the prefill side there."""
        return self.prefills.known

    @property
    def supports_host_destination(self) -> bool:
        """Whether pages in host memory can be named."""
        return self.host is not None

    def pool_at(self, destination: Any) -> Any:
        """The manager of the pool in which a request's pages are.

        Args:
            destination: SGLang's KVTransferDestination.

        Raises:
            InputError: this rank has no such pool.
        """
        if destination == KVTransferDestination.DEVICE:
            return self.inner
        if destination == KVTransferDestination.HOST and self.host is not None:
            return self.host
        raise InputError(
            f"destination {destination} is not a pool of this rank",
            hint="start decode with --disaggregation-decode-host-receive-threshold below 1",
        )

    def register_to_bootstrap(self) -> None:
        """Nothing more: a prefill rank is registered, and renewed, from its construction on."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the prefill side's grid is known; a look-up is begun if not. Waits for some milliseconds at most."""
        return self.prefills.ensure(bootstrap_addr)

    # -- pages of failed rooms

    def hold(self, room: int, held: Room) -> None:
        """Remember a failed room whose pages may still be written."""
        self._held[room] = held

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:
        """Whether nothing can land in the pages of a failed room any more."""
        del required_acks
        held = self._held.get(room)
        return held is None or held.is_release_safe()

    def clear_deferred_abort_state(self, room: int) -> None:
        """The room's pages were given back."""
        self._held.pop(room, None)

    # -- recompute after a retraction

    def _ensure_prefill_recompute_executor(self) -> ThreadPoolExecutor:
        """Threads for bounded calls over HTTP."""
        with self._executor_lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(4, thread_name_prefix="kvferry-sglang")
            return self._executor

    def submit_prefill_recompute(self, receiver: Any, payload: dict[str, Any]) -> None:
        """Ask the prefill server to compute a retracted request again; one rank does."""
        rank = self.geometry.rank
        if (rank.pp, rank.cp, rank.tp) == (0, 0, 0):
            self._ensure_prefill_recompute_executor().submit(self.prefills.recompute, receiver, payload)

    # -- helpers

    def _open_host(self, side: Side, args: Any) -> Any:
        try:
            found = host_args(args)
            return found and self._open(side, found, self.geometry.on_host())
        except BaseException:
            self.inner.shutdown()
            raise

    def _open(self, side: Side, args: Any, geometry: Geometry) -> Any:
        layout = layout_of(args, geometry)
        aux = [
            (int(address), int(nbytes), int(item))
            for address, nbytes, item in zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True)
        ]
        group = [] if side is Side.PREFILL else [layout_of(args, geometry.at_tp(tp)) for tp in range(geometry.sizes.tp)]
        manager = get_kv_class(self.engine_name, KVClassType.MANAGER)
        address = None
        if side is Side.PREFILL:
            host = str(get_serving().host)
            address = join_address(_LOOPBACK.get(host, host), int(get_disagg().disaggregation_bootstrap_port))
        extra = {
            "http_port": str(get_serving().port), "page_size": str(args.page_size),
            "kv_cache_dtype": str(args.kv_cache_dtype_str),
        }  # fmt: skip
        made = manager(KVArgs(layout, (), aux, group), side, bootstrap_addr=address, sizes=geometry.sizes, extra=extra)
        log.info("kvferry %s %s, engine %s, at %s", side.value, layout.rank, self.engine_name, made.endpoint)
        return made
