"""The Mooncake engine's own settings, given as text (KVFERRY_ENGINE_OPTIONS=name=value,...)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvferry.errors import ConfigError

LEAST_TIMEOUT_S, DEFAULT_TIMEOUT_S, MOST_TIMEOUT_S = 5, 10, 3600
"""The library takes nothing below 5 s; its own default is 30 s."""


class Options(NamedTuple):
    """The settings.

    Attributes:
        protocol: handed to the library, which chooses the transport itself.
        devices: names of network devices, with commas or plus signs between them; or JSON that maps the numbers of
            accelerators to such names.
        device_index: which entry of a JSON `devices` is this process's.
        timeout_s: after how many seconds a transfer is given up.
    """

    protocol: str = "tcp"
    devices: str = ""
    device_index: int = 0
    timeout_s: int = DEFAULT_TIMEOUT_S


def parse(options: Mapping[str, str]) -> Options:
    """Read the settings.

    Raises:
        ConfigError: an unknown name, or a value that is none.
    """
    unknown = sorted(set(options) - set(Options._fields))
    if unknown:
        names = ", ".join(map(repr, Options._fields))
        raise ConfigError(f"the mooncake engine has no option {unknown[0]!r}", hint=f"its options are {names}")
    index = _number("device_index", options.get("device_index", "0"), 0, 1 << 16)
    given = os.environ.get("MC_TRANSFER_TIMEOUT", "")
    default = str(max(LEAST_TIMEOUT_S, int(given))) if given.isdecimal() else str(DEFAULT_TIMEOUT_S)
    timeout_s = _number("timeout_s", options.get("timeout_s", default), LEAST_TIMEOUT_S, MOST_TIMEOUT_S)
    return Options(options.get("protocol", "tcp"), _devices(options.get("devices", ""), index), index, timeout_s)


def _number(name: str, text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(f"option {name!r} of the mooncake engine is {text!r}", hint=f"a number, {least} to {most}")
    return int(text)


def _devices(text: str, index: int) -> str:
    """The names of one process, with commas: what `devices` says, or its entry of a JSON object."""
    if text.startswith("{"):
        text = _entry(text, index)
    return ",".join(name.strip() for name in text.replace("+", ",").split(",") if name.strip())


def _entry(text: str, index: int) -> str:
    try:
        table = msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(f"option 'devices' of the mooncake engine is no JSON of names: {error}") from error
    if str(index) not in table:
        raise ConfigError(
            f"option 'devices' of the mooncake engine names no device for index {index}",
            hint=f"it has {', '.join(sorted(table)) or 'none'}; 'device_index' says which one is meant",
        )
    return table[str(index)]
