"""The routes that SGLang asks its own registry: the grid, one rank's address, the DP rank of a room. Read-only.

Source: SGLang 0.5.23, disaggregation/common/conn.py, `CommonKVBootstrapServer` (the answers' fields and statuses).
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.bootstrap import ForeignRoute, RefusedError, Registry
from kvferry.bootstrap.address import parse_address
from kvferry.ids import Rank

AXES = {"dp": "prefill_dp_rank", "cp": "prefill_cp_rank", "tp": "target_tp_rank", "pp": "target_pp_rank"}
"""Our axes, and the names of SGLang's query."""


class _Rooms(msgspec.Struct):
    bootstrap_rooms: list[int]


def route(registry: Registry, query: dict[str, str], _body: bytes, now: float) -> tuple[int, object]:
    """GET /route: the grid if all numbers are -1, else one rank's address; 503 while ranks are missing."""
    try:
        asked = {axis: int(query[name]) for axis, name in AXES.items()}
    except (KeyError, ValueError):
        return 400, f"/route wants whole numbers for {', '.join(AXES.values())}"
    topology = registry.topology(None, now)
    if topology.sizes is None or topology.missing:
        return 503, f"{len(topology.entries)} prefill ranks are registered, {len(topology.missing)} are missing"
    if set(asked.values()) == {-1}:
        return 200, _grid(topology.sizes, topology.entries[0].extra)
    entry = next((entry for entry in topology.entries if entry.rank == Rank(**asked)), None)
    if entry is None:
        return 404, f"no prefill rank {Rank(**asked)}"
    host, port = parse_address(entry.endpoint.removeprefix("tcp://"))
    return 200, {"rank_ip": host, "rank_port": port}


def query_dp_ranks(registry: Registry, _query: dict[str, str], body: bytes, now: float) -> tuple[int, object]:
    """POST /query_dp_ranks {"bootstrap_rooms": [...]}: room -> DP rank, of the rooms that are known."""
    try:
        rooms = msgspec.json.decode(body, type=_Rooms).bootstrap_rooms
    except msgspec.MsgspecError as error:
        return 400, f"/query_dp_ranks: {error}"
    try:
        found = registry.query_rooms(rooms, now)
    except RefusedError as error:
        return 400, str(error)
    return 200, {str(room): dp for room, dp in found.items()}


def _grid(sizes: Rank, extra: dict[str, str]) -> dict[str, Any]:
    port = extra.get("http_port", "")
    return {
        "attn_tp_size": sizes.tp, "attn_cp_size": sizes.cp, "dp_size": sizes.dp, "pp_size": sizes.pp,
        "page_size": int(extra["page_size"]) if "page_size" in extra else None,
        "kv_cache_dtype": extra.get("kv_cache_dtype"), "follow_bootstrap_room": False,
        "prefill_http_port": int(port) if port else None,
    }  # fmt: skip


ROUTES = (
    ForeignRoute("/route", "GET", route),
    # SGLang asks without a token; a DP rank is no secret, and nothing can be written here
    ForeignRoute("/query_dp_ranks", "POST", query_dp_ranks, needs_token=False),
)
"""For `KVBootstrapServer(more=...)`."""
