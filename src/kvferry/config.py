"""Settings: defaults, environment variables KVFERRY_*, keyword overrides; each effective value with its source.

An unknown key, or an unknown variable with our prefix, is an error that names the nearest known one: a mistyped
time-out that is silently ignored is found only when it was needed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.errors import ConfigError

PREFIX = "KVFERRY_"
RESERVED = frozenset({"KVFERRY_ENGINE", "KVFERRY_MODEL", "KVFERRY_SECRET"})
"""Variables with our prefix that are read elsewhere."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a node. Times in seconds, sizes in bytes.

    Attributes:
        bind_host: address to listen on.
        advertise_host: address that peers are told; "" means bind_host.
        data_bind_host: address to listen on for the data plane; "" means bind_host.
        data_advertise_host: address that peers are told for the data plane; "" means data_bind_host, if that is set,
            else advertise_host.
        control_ports: "0" (the system chooses), "5000" or "5000-5099": ports of the control plane.
        data_ports: the same for engines with sockets of their own.
        insecure: allow a non-loopback bind although the control plane has no keys yet.
        tick_s: how often snapshots that are not acknowledged are repeated.
        heartbeat_s: interval of the connection's heartbeats.
        heartbeat_timeout_s: silence after which a peer counts as lost.
        bootstrap_timeout_s: decode side: time until every source has accepted the claim.
        claim_timeout_s: prefill side: time until every expected claim has come.
        stall_s: time without a byte landed, while writes are out and the peer is alive.
        drain_limit_s: time after a failure until pages that are not proven quiet are quarantined.
        hold_limit_s: decode side: longest wait for sources that are alive and queued; 0 means no limit.
        batch_rows: most rows of one batch.
        batch_bytes: most bytes of one batch.
        batches_in_flight: batches of one peer that the mover keeps submitted.
        digest: canary over what was sent and what landed: "sample" (64 bytes in 4 KiB), "full" (every byte) or
            "off"; of two peers the stronger wish counts.
        engine_options: comma separated name=value pairs for the engine; a value may hold commas, as lists do.
    """

    bind_host: str = "127.0.0.1"
    advertise_host: str = ""
    data_bind_host: str = ""
    data_advertise_host: str = ""
    control_ports: str = "0"
    data_ports: str = "0"
    insecure: bool = False
    tick_s: float = 0.1
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    bootstrap_timeout_s: float = 30.0
    claim_timeout_s: float = 30.0
    stall_s: float = 10.0
    drain_limit_s: float = 30.0
    hold_limit_s: float = 0.0
    batch_rows: int = 16384
    batch_bytes: int = 16 << 20
    batches_in_flight: int = 4
    digest: str = "sample"
    engine_options: str = ""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(Config):
            _check(field.name, getattr(self, field.name), field.type)
        for shorter, longer, why in _TWICE:
            short, long = getattr(self, shorter), getattr(self, longer)
            if long < 2 * short:
                raise ConfigError(f"{longer} = {long:g} is below twice {shorter} = {short:g}", hint=why)
        if self.digest not in DIGESTS:
            raise ConfigError(f"setting digest = {self.digest!r} is none of {', '.join(DIGESTS)}")
        port_range(self.control_ports, "control_ports")
        port_range(self.data_ports, "data_ports")
        self.options()

    def options(self) -> dict[str, str]:
        """engine_options as a dictionary."""
        pairs = [pair for text in _NEXT_OPTION.split(self.engine_options) if (pair := text.strip(" ,"))]
        for pair in pairs:
            if "=" not in pair:
                raise ConfigError(f"engine_options: {pair!r} is not name=value")
        return {name.strip(): value.strip() for name, _, value in (pair.partition("=") for pair in pairs)}


_NEXT_OPTION = re.compile(r",(?=\s*[\w.]+\s*=)")
"""The commas that begin another option."""

DIGESTS = ("off", "sample", "full")
"""From the weakest to the strongest."""

_TWICE = (
    ("heartbeat_s", "heartbeat_timeout_s", "one late heartbeat would count as a lost peer"),
    *(
        ("tick_s", name, "deadlines are looked at on ticks; raise it, or lower tick_s")
        for name in ("bootstrap_timeout_s", "claim_timeout_s", "stall_s", "drain_limit_s")
    ),
)
"""(shorter, longer, why): the longer time must be at least twice the shorter one."""

_MOST = {float: 3600.0, int: 1 << 30}
"""The sockets count heartbeats in a number of bits; an hour is a mistake for every other time as well."""

_POSITIVE = (
    "tick_s",
    "heartbeat_s",
    "heartbeat_timeout_s",
    "bootstrap_timeout_s",
    "claim_timeout_s",
    "stall_s",
    "drain_limit_s",
    "batch_rows",
    "batch_bytes",
    "batches_in_flight",
)


def _check(name: str, value: object, kind: type) -> None:
    if kind is float and type(value) is int:
        kind = int
    if type(value) is not kind:
        raise ConfigError(f"setting {name} = {value!r} is not of type {kind.__name__}")
    if not isinstance(value, (int, float)) or kind is bool:
        return
    least = "must be above 0" if name in _POSITIVE else "must not be negative"
    if not value >= 0 or (name in _POSITIVE and not value):
        raise ConfigError(f"setting {name} = {value!r} {least}")
    if not math.isfinite(value) or value > _MOST[type(value)]:
        raise ConfigError(f"setting {name} = {value!r} is above {_MOST[type(value)]:g}", hint="times are in seconds")


def port_range(text: str, name: str) -> tuple[int, int]:
    """Parse "0", "5000" or "5000-5099" into (first, last).

    Raises:
        ConfigError: it is none of these, or a port is outside 0..65535.
    """
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is neither a port nor a range", hint='e.g. "5000-5099"') from None
    if not 0 <= low <= high <= 65535:
        raise ConfigError(f"{name}: {text!r} is not a range within 0..65535")
    return low, high


def load(environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
    """Defaults, then KVFERRY_* variables of `environ`, then keyword overrides.

    Args:
        environ: usually os.environ; None reads no variable.
        overrides: settings by name.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type or range; it names where the value came from.
    """
    values: dict[str, Any] = {}
    for variable, text in (environ or {}).items():
        if variable.startswith(PREFIX) and variable not in RESERVED:
            field = _known(variable, _VARIABLES, "environment variable")
            values[field.name] = _convert(field, text, f"environment variable {variable}")
    return Config(**{**values, **_converted(overrides)})


def override(config: Config, **overrides: Any) -> Config:
    """A copy of the settings with some of them replaced.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type or range.
    """
    return msgspec.structs.replace(config, **_converted(overrides))


def explain(config: Config, environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Each setting's effective value and where it came from: "default", a variable's name or "argument"."""
    result: dict[str, tuple[Any, str]] = {}
    for field in msgspec.structs.fields(Config):
        value, variable = getattr(config, field.name), PREFIX + field.name.upper()
        source = "default" if value == field.default else "argument"
        if variable in environ and _convert(field, environ[variable], variable) == value:
            source = variable
        result[field.name] = (value, source)
    return result


def _converted(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _convert(_known(name, _SETTINGS, "setting"), value, f"setting {name}")
        for name, value in overrides.items()
    }


_SETTINGS = {field.name: field for field in msgspec.structs.fields(Config)}
_VARIABLES = {PREFIX + name.upper(): field for name, field in _SETTINGS.items()}


def _known(name: str, fields: Mapping[str, msgspec.structs.FieldInfo], what: str) -> msgspec.structs.FieldInfo:
    if name not in fields:
        names = [*fields, *(RESERVED if fields is _VARIABLES else ())]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(sorted(names))
        raise ConfigError(f"unknown {what} {name}", hint=hint)
    return fields[name]


def _convert(field: msgspec.structs.FieldInfo, value: Any, shown: str) -> Any:
    try:
        return msgspec.convert(value, field.type, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{shown} = {value!r} is not of type {field.type.__name__}") from None
