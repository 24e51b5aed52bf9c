"""`kv_transfer_params`: what prefill's answer says to the decode server, through whatever proxy is between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry.errors import InputError
from kvferry.node.resolver import split_address

KEY = "kvferry"
"""Our entry among the parameters; those beside it are the names that proxies know."""


class Handoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a request's KV is.

    Attributes:
        room: hexadecimal: proxies that read JSON numbers as floating point would round a number.
        peers: "tcp://host:port" of all prefill ranks.
        num_tokens: tokens whose KV is offered.
    """

    room: str
    peers: list[str]
    num_tokens: int

    @property
    def room_number(self) -> int:
        """The room. Raises ValueError."""
        return int(self.room, 16)


def answer(room: int, peers: Sequence[str], num_tokens: int, *, engine_id: str, request_id: str) -> dict[str, Any]:
    """The parameters of a finished prefill.

    Args:
        room: the room.
        peers: the control plane of each prefill rank.
        num_tokens: tokens whose KV is offered.
        engine_id: vLLM's name of the prefill engine.
        request_id: vLLM's name of the request there.
    """
    host, port = split_address(peers[0])
    return {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": engine_id,
        "remote_request_id": request_id, "remote_host": host, "remote_port": port, "tp_size": len(peers),
        KEY: msgspec.to_builtins(Handoff(f"{room:x}", list(peers), num_tokens)),
    }  # fmt: skip


def handoff_of(params: Mapping[str, Any], num_tokens: int) -> Handoff:
    """Read the parameters that a request brought to the decode side.

    Args:
        params: they may come from anybody.
        num_tokens: tokens that this side wants.

    Raises:
        InputError: they are not ours, malformed, or of a prompt of another length.
    """
    hint = "pass kv_transfer_params of the prefill answer on unchanged, from a server with KVFerryConnector"
    if KEY not in params:
        raise InputError(f"decode kv_transfer_params: no entry {KEY!r} among {sorted(map(str, params))}", hint=hint)
    try:
        found = msgspec.convert(params[KEY], Handoff)
        number = found.room_number
    except (msgspec.ValidationError, ValueError) as error:
        raise InputError(f"decode kv_transfer_params[{KEY!r}]: {error}", hint=hint) from None
    if not found.peers or not 0 < number < 2**64:
        raise InputError(f"decode kv_transfer_params[{KEY!r}]: room {number:x}, {len(found.peers)} peers", hint=hint)
    if found.num_tokens != num_tokens:
        raise InputError(
            f"decode kv_transfer_params[{KEY!r}]: prefill offers {found.num_tokens} tokens, decode needs {num_tokens}",
            hint="send both servers the same prompt; chat templates and tokenizers must agree",
        )
    return found
