"""What SGLang calls before it reads its command line: kvferry becomes one more transfer backend.

Nothing of SGLang is edited: the list of names and the enumeration are extended in place, and `get_kv_class` is hooked
in every module that holds the name, through SGLang's own registry of hooks (0.5.23: plugins/hook_registry.py).
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Callable
from typing import Any

log = logging.getLogger("kvferry.sglang")

TESTED = "0.5.23"
BACKENDS: dict[str, str | None] = {
    "kvferry": None,
    "kvferry_local": "local",
    "kvferry_nixl": "nixl",
    "kvferry_mooncake": "mooncake",
    "kvferry_mori": "mori",
}
"""Names for --disaggregation-transfer-backend, and the engine that each means; None: KVFERRY_ENGINE, else local."""

HOLDERS = ("disaggregation.utils", "disaggregation.prefill", "disaggregation.decode", "managers.disagg_service")
"""Modules that hold `get_kv_class` under a name of their own."""

_classes: dict[str, dict[str, type]] = {}


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`; runs in every process of a server, and may run twice."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _warn_of_other_versions()
    new = [name for name in BACKENDS if name not in choices.DISAGG_TRANSFER_BACKEND_CHOICES]
    if not new:
        return
    choices.add_disagg_transfer_backend_choices(new)
    _extend_enumeration(new)
    for module in HOLDERS:
        HookRegistry.register(f"sglang.srt.{module}.get_kv_class", get_kv_class, HookType.AROUND)
    from kvferry.compat.sglang import requests

    requests.register(HookRegistry, HookType)


def get_kv_class(original: Callable[..., Any], backend: Any, kind: Any) -> Any:
    """Answer for our names, pass everything else on."""
    name = str(getattr(backend, "value", backend))
    if name not in BACKENDS:
        return original(backend, kind)
    engine = BACKENDS[name] or os.environ.get("KVFERRY_ENGINE") or "local"
    return classes_for(engine)[str(getattr(kind, "value", kind))]


def classes_for(engine: str) -> dict[str, type]:
    """SGLang's kinds of classes -> ours, bound to an engine."""
    if engine not in _classes:
        from sglang.srt.disaggregation.base import KVArgs
        from sglang.srt.disaggregation.utils import KVClassType

        from kvferry.compat.sglang.manager import KVFerryManager
        from kvferry.compat.sglang.receiver import KVFerryReceiver
        from kvferry.compat.sglang.sender import KVFerrySender
        from kvferry.compat.sglang.server import KVFerryBootstrapServer

        _classes[engine] = {
            KVClassType.KVARGS.value: KVArgs,
            KVClassType.MANAGER.value: type("KVFerryManager", (KVFerryManager,), {"engine_name": engine}),
            KVClassType.SENDER.value: KVFerrySender,
            KVClassType.RECEIVER.value: KVFerryReceiver,
            KVClassType.BOOTSTRAP_SERVER.value: KVFerryBootstrapServer,
        }
    return _classes[engine]


def _extend_enumeration(names: list[str]) -> None:
    """Add members to SGLang's TransferBackend, which has no call for it."""
    from sglang.srt.disaggregation.utils import TransferBackend

    for name in names:
        member = object.__new__(TransferBackend)
        member._name_, member._value_ = name.upper(), name
        member.__objclass__ = TransferBackend
        member._sort_order_ = len(TransferBackend._member_names_)
        TransferBackend._member_names_.append(member._name_)
        TransferBackend._member_map_[member._name_] = member
        TransferBackend._value2member_map_[name] = member
        type.__setattr__(TransferBackend, member._name_, member)


def _warn_of_other_versions() -> None:
    found = importlib.metadata.version("sglang")
    if found != TESTED:
        log.warning("kvferry was tested with SGLang %s, this is %s; it goes on", TESTED, found)
