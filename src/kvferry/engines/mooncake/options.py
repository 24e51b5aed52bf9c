"""The Mooncake engine's own settings, given as text (KVFERRY_ENGINE_OPTIONS=name=value,...)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from kvferry.engines import devices
from kvferry.engines.devices import devices_of
from kvferry.engines.option_text import check_known
from kvferry.errors import ConfigError

KNOWN = ("protocol", *devices.OPTIONS, "timeout_s")
LEAST_TIMEOUT_S, DEFAULT_TIMEOUT_S, MOST_TIMEOUT_S = 5, 10, 3600
"""The library takes nothing below 5 s; its own default is 30 s."""


class Options(NamedTuple):
    """The settings.

    Attributes:
        protocol: handed to the library, which chooses the transport itself.
        devices: names of network devices, with commas between them.
        timeout_s: after how many seconds a transfer is given up.
    """

    protocol: str = "tcp"
    devices: str = ""
    timeout_s: int = DEFAULT_TIMEOUT_S


def parse(options: Mapping[str, str]) -> Options:
    """Read the settings.

    Raises:
        ConfigError: an unknown name, or a value that is none.
    """
    check_known(options, KNOWN, "mooncake")
    given = os.environ.get("MC_TRANSFER_TIMEOUT", "")
    default = str(max(LEAST_TIMEOUT_S, int(given))) if given.isdecimal() else str(DEFAULT_TIMEOUT_S)
    timeout_s = _number("timeout_s", options.get("timeout_s", default), LEAST_TIMEOUT_S, MOST_TIMEOUT_S)
    return Options(options.get("protocol", "tcp"), ",".join(devices_of(options, "mooncake")), timeout_s)


def _number(name: str, text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(f"option {name!r} of the mooncake engine is {text!r}", hint=f"a number, {least} to {most}")
    return int(text)
