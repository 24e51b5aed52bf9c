"""Tell senders and receivers which request they serve: its tokens and a tag of their ids.

SGLang gives neither to a backend. With them exactly the request's tokens are carried, and a room number that two
requests share joins nothing. Without them (another version, where a hook finds no target) whole pages are carried,
untagged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvferry.api import request_tag

log = logging.getLogger("kvferry.sglang")

CREATED = {
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender": "sender_created",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue": "receiver_created",
}
"""Where SGLang makes a sender or receiver, and what is called after it."""


def register(registry: Any, hook_types: Any) -> None:
    """Hook both places."""
    for target, name in CREATED.items():
        registry.register(target, globals()[name], hook_types.AFTER)


def sender_created(result: Any, _queue: Any, req: Any, *_: Any, **__: Any) -> Any:
    """After PrefillBootstrapQueue.create_sender(req, num_kv_heads) -> bool."""
    if result:
        _tell(getattr(req, "disagg_kv_sender", None), req, list(req.origin_input_ids))
    return result


def receiver_created(result: Any, _queue: Any, req: Any, *, is_rebootstrap: bool = False, **__: Any) -> Any:
    """After DecodePreallocQueue._create_receiver_and_enqueue(req, is_rebootstrap) -> DecodeRequest."""
    tokens = list(req.origin_input_ids) + (list(req.output_ids) if is_rebootstrap else [])
    _tell(getattr(result, "kv_receiver", None), req, tokens)
    return result


def _tell(end: Any, req: Any, tokens: Sequence[int]) -> None:
    told = getattr(end, "tell_request", None)
    if told is not None:
        # the ids of an image's place-holders are made by each server for itself
        tag = 0 if getattr(req, "multimodal_inputs", None) is not None else request_tag(tokens)
        told(len(tokens), tag)
