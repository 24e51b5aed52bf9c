"""Engine look-up: by name, imported only when used; one that is broken or missing never disturbs another."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from typing import cast

import msgspec

from kvferry.engines.seam import Engine
from kvferry.errors import ConfigError, EngineUnavailable, UnknownEngine

ENTRY_POINT_GROUP = "kvferry.engines"

_CALLS = ("open", "register", "describe", "attach", "submit", "poll", "fence", "detach", "close")


class EngineInfo(msgspec.Struct, frozen=True):
    """What is known of an engine without importing it.

    Attributes:
        name: the name that `load` takes.
        target: "package.module:Class".
        hint: what makes it usable, for instance the install line.
        origin: "built in", "entry point" or "registered".
    """

    name: str
    target: str
    hint: str = ""
    origin: str = "built in"


_BUILT_IN = (
    EngineInfo("local", "kvferry.engines.local:LocalEngine", "part of kvferry; needs nothing else"),
    EngineInfo("nixl", "kvferry.engines.nixl:NixlEngine", "pip install --no-deps nixl-cu12==1.5.1"),
    EngineInfo(
        "mooncake",
        "kvferry.engines.mooncake:MooncakeEngine",
        "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1; "
        "on Debian also apt-get install libibverbs1 libnuma1 libcurl4",
    ),
    EngineInfo(
        "mori",
        "kvferry.engines.mori:MoriEngine",
        "pip install amd-mori==1.2.4 with Python 3.10 or 3.12; it needs ROCm 7",
    ),
)
_registered: dict[str, EngineInfo] = {}


def known() -> dict[str, EngineInfo]:
    """List engines by name. Registered ones go before entry points, and those before the built-in table."""
    found = {info.name: info for info in _BUILT_IN}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name not in found:
            hint = f"comes with {point.dist.name} {point.dist.version}" if point.dist else ""
            found[point.name] = EngineInfo(point.name, point.value, hint, "entry point")
    return found | _registered


def register(name: str, target: str, hint: str = "") -> None:
    """Make an engine known that no installed package declares; an earlier one of that name is replaced.

    Args:
        name: the name that `load` will take.
        target: "package.module:Class"; imported only by `load`.
        hint: what to do when it can't be imported, for instance the install line.

    Raises:
        ConfigError: the target is not of that form.
    """
    module, _, attribute = target.partition(":")
    if not name or not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise ConfigError(f"engine {name!r} is registered as {target!r}", hint="give 'package.module:Class'")
    _registered[name] = EngineInfo(name, target, hint, "registered")


def canonical(name: str) -> str:
    """Find the name that an engine is known under: the same, or one that differs in upper and lower case only.

    A name that is not known is returned as it is; `load` says what is wrong with it.
    """
    engines = known()
    if name in engines:
        return name
    return next((other for other in engines if other.casefold() == name.casefold()), name)


def load(name: str) -> Engine:
    """Import an engine and make one instance, not yet opened. Upper and lower case in its name don't matter.

    Raises:
        UnknownEngine: no engine has this name.
        EngineUnavailable: it can't be imported or made here.
    """
    engines = known()
    name = canonical(name)
    if name not in engines:
        raise _unknown(name, engines)
    info = engines[name]
    factory = _import(info)
    engine = _make(info, factory)
    missing = [call for call in _CALLS if not callable(getattr(engine, call, None))]
    if missing:
        raise EngineUnavailable(
            f"engine {name!r} ({info.target}) lacks {', '.join(missing)} of the nine calls", hint=info.hint
        )
    return cast("Engine", engine)


def _unknown(name: str, engines: dict[str, EngineInfo]) -> UnknownEngine:
    near = difflib.get_close_matches(name.casefold(), engines, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return UnknownEngine(f"no engine is called {name!r}", hint=f"{meant}known: {', '.join(sorted(engines))}")


def _import(info: EngineInfo) -> object:
    module, _, attribute = info.target.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        missing = f"package {error.name!r} is missing" if isinstance(error, ModuleNotFoundError) else str(error)
        raise EngineUnavailable(f"engine {info.name!r} can't be imported: {missing}", hint=info.hint) from error
    except Exception as error:
        # whatever foreign code raises while it is imported concerns this engine alone
        raise EngineUnavailable(
            f"engine {info.name!r} ({info.target}) is broken: {type(error).__name__}: {error}", hint=info.hint
        ) from error
    return found


def _make(info: EngineInfo, factory: object) -> object:
    if not callable(factory):
        raise EngineUnavailable(f"engine {info.name!r}: {info.target} is not a class", hint=info.hint)
    try:
        return factory()
    except EngineUnavailable:
        raise  # it says what is missing
    except Exception as error:
        raise EngineUnavailable(
            f"engine {info.name!r} ({info.target}) can't be made: {type(error).__name__}: {error}",
            hint=info.hint,
        ) from error
