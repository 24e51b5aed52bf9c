"""`kvferry engines`: what each known engine is, whether it can be used here, and what it finds out about this host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvferry.engines import find
from kvferry.engines.find import EngineInfo
from kvferry.engines.findings import Finding
from kvferry.engines.seam import Caps, Engine, Limits
from kvferry.errors import KvferryError


class EngineView(msgspec.Struct, frozen=True):
    """One engine.

    Attributes:
        name: what `load` takes.
        origin: "built in", "entry point" or "registered".
        target: "package.module:Class", or empty.
        usable: whether it can be imported and made here.
        reason: why not, in words.
        hint: what makes it usable.
        capabilities: names of `Caps`, in lower case, before it is opened with options.
        limits: the most that one batch may hold; None if it is not usable.
        tryout: what it found out about this host, if it does so.
    """

    name: str
    origin: str
    target: str
    usable: bool
    reason: str = ""
    hint: str = ""
    capabilities: list[str] = []
    limits: Limits | None = None
    tryout: list[Finding] = []


def look() -> list[EngineView]:
    """Load every known engine and have it try out what it can; one that is broken is shown with its reason."""
    return [_view(info) for info in find.known().values()]


def as_json(views: list[EngineView]) -> str:
    """One object with the key "engines"."""
    return msgspec.json.encode({"engines": views}).decode()


def tables(views: list[EngineView]) -> Iterator[RenderableType]:
    """A table of all engines, then one for each that has tried something."""
    table = Table("engine", "from", "usable", "what it can do, or why not", box=box.SIMPLE)
    for view in views:
        table.add_row(view.name, view.origin, _works(view.usable), _about(view))
    yield table
    for view in views:
        if view.tryout:
            tried = Table(f"{view.name} on this host", "works", "", box=box.SIMPLE)
            for finding in view.tryout:
                tried.add_row(finding.key.replace("_", " "), _works(finding.works), finding.text)
            yield tried


def _view(info: EngineInfo) -> EngineView:
    try:
        engine = find.load(info.name)
    except KvferryError as error:
        return EngineView(info.name, info.origin, info.target, False, error.message, error.hint or info.hint)
    names = [cap.name.lower() for cap in Caps if cap.value and cap in engine.caps and cap.name]
    return EngineView(
        info.name, info.origin, info.target, True, hint=info.hint, capabilities=names, limits=engine.limits,
        tryout=_tryout(engine),
    )  # fmt: skip


def _tryout(engine: Engine) -> list[Finding]:
    tryout: Callable[[], list[Finding]] | None = getattr(engine, "tryout", None)
    if tryout is None:
        return []
    try:
        return tryout()
    except Exception as error:  # noqa: BLE001 - whatever foreign code raises concerns this engine alone
        return [Finding("tryout", False, f"it failed: {type(error).__name__}: {error}")]


def _works(works: bool | None) -> Text:
    return Text("") if works is None else Text("yes", "green") if works else Text("no", "red")


def _about(view: EngineView) -> str:
    if view.limits is None:
        return f"{view.reason} ({view.hint})" if view.hint else view.reason
    can = ", ".join(view.capabilities) or "nothing beyond the nine calls"
    return f"{can}; at most {view.limits.rows} rows and {view.limits.bytes >> 10} KiB in one batch"
