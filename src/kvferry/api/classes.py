"""The four classes, bound to an engine's name."""

from __future__ import annotations

import functools

from kvferry.api.bootstrap_server import KVBootstrapServer
from kvferry.api.kvpoll import KVClassType
from kvferry.api.manager import KVManager
from kvferry.api.memory import KVArgs
from kvferry.api.receiver import KVReceiver
from kvferry.api.sender import KVSender
from kvferry.engines import find
from kvferry.errors import InputError

_CLASSES: dict[KVClassType, type] = {
    KVClassType.KVARGS: KVArgs,
    KVClassType.MANAGER: KVManager,
    KVClassType.SENDER: KVSender,
    KVClassType.RECEIVER: KVReceiver,
    KVClassType.BOOTSTRAP_SERVER: KVBootstrapServer,
}


@functools.cache
def get_kv_class(engine_name: str, class_type: KVClassType) -> type:
    """The manager, sender, receiver or bootstrap server class for an engine.

    They are the same classes for every engine; only the manager's class knows the name.

    Raises:
        UnknownEngine: no engine of that name is known; it names the nearest.
        InputError: class_type is no KVClassType (or the value of one, as "manager").
    """
    try:
        class_type = KVClassType(class_type)
    except ValueError:
        hint = f"one of {', '.join(str(each) for each in KVClassType)}"
        raise InputError(f"get_kv_class: {class_type!r} is no class type", hint=hint) from None
    if not isinstance(engine_name, str):
        raise InputError(f"get_kv_class: {engine_name!r} is no engine's name", hint="see `kvferry engines`")
    engine_name = find.canonical(engine_name)
    if engine_name not in find.known():
        find.load(engine_name)  # raises, naming the nearest
    found = _CLASSES[class_type]
    if class_type is KVClassType.MANAGER:
        own = {"engine_name": engine_name, "__doc__": found.__doc__, "__module__": found.__module__}
        return type(found.__name__, (found,), own)
    return found
