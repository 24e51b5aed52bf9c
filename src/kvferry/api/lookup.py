"""From a room to the addresses of the prefill ranks that serve it, through the bootstrap server."""

from __future__ import annotations

import time

from kvferry.bootstrap import BootstrapClient, Topology
from kvferry.errors import BootstrapError

PUBLISH_S = 2.0
"""How long a room may be unknown at the server: prefill may publish its DP rank a little after decode asks."""


def find_ranks(address: str, room: int, dp_rank: int | None, secret: str | None) -> Topology:
    """Ask the bootstrap server which ranks serve a room; with dp_rank None it is asked for that as well.

    Raises:
        BootstrapError: it can't be reached, does not know the room's rank, or ranks are missing.
    """
    client = BootstrapClient(address, token=secret)
    if dp_rank is None:
        topology = client.topology(None)
        several = topology.sizes is not None and topology.sizes.dp > 1
        dp_rank = _dp_of(client, address, room) if several else 0
    topology = client.topology(dp_rank)
    if topology.missing or not topology.entries:
        missing = ", ".join(str(rank) for rank in topology.missing[:4]) or "all ranks"
        raise BootstrapError(
            f"bootstrap server {address}: {missing} of the prefill side not registered",
            hint="wait for the prefill workers to start, or look at /ready",
        )
    return topology


def _dp_of(client: BootstrapClient, address: str, room: int) -> int:
    deadline = time.monotonic() + PUBLISH_S
    while room not in (found := client.query_rooms([room])) and time.monotonic() < deadline:
        time.sleep(0.1)
    if room not in found:
        raise BootstrapError(
            f"bootstrap server {address} does not know the DP rank of room {room}",
            hint="pass prefill_dp_rank, or let the prefill side publish it",
        )
    return found[room]
