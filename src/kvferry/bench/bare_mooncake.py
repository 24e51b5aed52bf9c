"""Mooncake's transfer engine driven bare: batch_transfer_sync_write, at most 1024 rows at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvferry import config as settings
from kvferry.bench.bare import Block
from kvferry.bench.failure import BenchError
from kvferry.engines.mooncake import library, options
from kvferry.engines.mooncake.instance import METADATA
from kvferry.engines.mooncake.quiet import LIMITS
from kvferry.plan import Batch

HOST = "127.0.0.1"


class Driver:
    """See `Bare`. Protocol and devices are those that kvferry's engine has, by this process's environment."""

    def __init__(self, pools: Sequence[Block]) -> None:
        chosen = options.parse(settings.load(os.environ).options())
        library.set_environment(chosen.timeout_s, (0, 0), ipv6=False)
        self._engine: Any = library.engine_class()()
        if self._engine.initialize(HOST, METADATA, chosen.protocol, chosen.devices):
            raise BenchError("the bare Mooncake engine can't start")
        self._addresses = [address for address, _ in pools]
        if self._engine.batch_register_memory(self._addresses, [nbytes for _, nbytes in pools]):
            raise BenchError("the bare Mooncake engine does not take the memory")
        self._peer = ""

    def describe(self) -> str:
        """The session."""
        return f"{HOST}:{self._engine.get_rpc_port()}"

    def attach(self, described: str) -> None:
        """Remember the target's session."""
        self._peer = described

    def write(self, batches: Sequence[Batch]) -> None:
        """One call for each batch, several where it has more rows than the library takes. Raises BenchError."""
        for batch in batches:
            for begin in range(0, len(batch), LIMITS.rows):
                part = slice(begin, begin + LIMITS.rows)
                src, dst, nbytes = (rows[part].tolist() for rows in (batch.src, batch.dst, batch.nbytes))
                if self._engine.batch_transfer_sync_write(self._peer, src, dst, nbytes):
                    raise BenchError(f"the bare Mooncake transfer of {len(src)} rows failed")

    def tell(self) -> None:
        """Nothing: the call returns when the target has acknowledged."""

    def serve(self, limit_s: float) -> None:
        """Nothing: the library has threads of its own."""

    def close(self) -> None:
        """Give the memory back."""
        self._engine.batch_unregister_memory(self._addresses)
