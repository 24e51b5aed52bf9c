"""NIXL driven bare: one agent, numpy descriptors, initialize_xfer, transfer, check_xfer_state. UCX as it comes."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Sequence

import numpy as np

from kvferry import config as settings
from kvferry.bench.bare import Block
from kvferry.bench.failure import BenchError
from kvferry.engines.nixl import library, options
from kvferry.plan import Batch
from kvferry.plan.batch import U64

HOST = "DRAM"
LIMIT_S = 60.0
_NAP_S = 0.0005
_END = b"end"


class Driver:
    """See `Bare`. The backend and its parameters are those that kvferry's engine has, in this process's environment."""

    def __init__(self, pools: Sequence[Block]) -> None:
        api = library.load().api
        chosen = options.parse(settings.load(os.environ).options())
        self._agent = api.nixl_agent(
            f"bare-{os.getpid()}", api.nixl_agent_config(enable_prog_thread=False, backends=[])
        )
        self._agent.create_backend(chosen.backend, chosen.parameters)
        blocks = [(address, nbytes, 0, "") for address, nbytes in pools]
        self._registration = self._agent.register_memory(blocks, HOST)
        self._peer = ""

    def describe(self) -> str:
        """The agent's metadata."""
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def attach(self, described: str) -> None:
        """Load the target's metadata; the library connects when it writes first, while the target serves."""
        name = self._agent.add_remote_agent(base64.b64decode(described))
        self._peer = name.decode() if isinstance(name, bytes) else name

    def write(self, batches: Sequence[Batch]) -> None:
        """One transfer for each batch. Raises BenchError if one is not done in time."""
        for batch in batches:
            self._write(batch)

    def tell(self) -> None:
        """Send the target a notification."""
        self._agent.send_notif(self._peer, _END)

    def serve(self, limit_s: float) -> None:
        """Look for notifications, which makes the library answer peers, until one has come. Raises BenchError."""
        until_s = time.monotonic() + limit_s
        while not any(self._agent.get_new_notifs().values()):
            if time.monotonic() > until_s:
                raise BenchError(f"no notification came from the bare NIXL agent within {limit_s:g} s")
            time.sleep(_NAP_S)

    def close(self) -> None:
        """Give the memory back."""
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registration)

    def _write(self, batch: Batch) -> None:
        agent = self._agent
        mine = agent.get_xfer_descs(_table(batch.src, batch.nbytes), HOST)
        theirs = agent.get_xfer_descs(_table(batch.dst, batch.nbytes), HOST)
        handle = agent.initialize_xfer("WRITE", mine, theirs, self._peer)
        state, until_s = agent.transfer(handle), time.monotonic() + LIMIT_S
        while state == "PROC":
            state = agent.check_xfer_state(handle)
            if time.monotonic() > until_s:
                break
        if state != "DONE":
            raise BenchError(f"the bare NIXL transfer of {len(batch)} rows ended as {state}")
        agent.release_xfer_handle(handle)


def _table(addresses: U64, nbytes: U64) -> U64:
    """uint64[N, 3]: address, length, device."""
    table = np.zeros((len(addresses), 3), np.uint64)
    table[:, 0], table[:, 1] = addresses, nbytes
    return table
