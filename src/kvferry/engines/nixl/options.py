"""The NIXL engine's own settings, given as text (KVFERRY_ENGINE_OPTIONS=name=value,...)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from kvferry.engines import devices
from kvferry.engines.devices import devices_of
from kvferry.engines.option_text import number_of, seconds_of, wrong
from kvferry.errors import ConfigError

KNOWN = (
    "backend", *devices.OPTIONS, "ucx_error_handling_mode", "num_workers", "attach_timeout_s", "transfer_timeout_s",
    "copy_threads",
)  # fmt: skip
PARAMETER = "param."
"""An option with this prefix is handed to the backend under the rest of its name."""

_ERROR_MODES = ("peer", "none")
_MAX_WORKERS = 64
_MAX_THREADS = 16


class Options(NamedTuple):
    """The settings.

    Attributes:
        backend: name of the NIXL plug-in.
        parameters: what it is created with.
        attach_timeout_s: seconds until a peer that can't be written to yet is given up.
        transfer_timeout_s: seconds until a batch that is not over counts as failed.
        copy_threads: threads that copy a large batch where the backend copies it in the call that begins it.
    """

    backend: str
    parameters: dict[str, str]
    attach_timeout_s: float
    transfer_timeout_s: float
    copy_threads: int


def parse(options: Mapping[str, str]) -> Options:
    """Read the settings; raises ConfigError for an unknown name or a value that is none."""
    for name in sorted(options):
        if name not in KNOWN and not (name.startswith(PARAMETER) and name.removeprefix(PARAMETER)):
            names = ", ".join(map(repr, KNOWN))
            raise ConfigError(
                f"the NIXL engine has no option {name!r}",
                hint=f"its options are {names}, and '{PARAMETER}<name>' for what the backend takes",
            )
    return Options(
        options.get("backend", "UCX"), _parameters(options),
        seconds_of(options, "attach_timeout_s", "10", "NIXL"), seconds_of(options, "transfer_timeout_s", "30", "NIXL"),
        number_of(options, "copy_threads", min(2, os.cpu_count() or 1), "NIXL", most=_MAX_THREADS),
    )  # fmt: skip


def _parameters(options: Mapping[str, str]) -> dict[str, str]:
    found = {
        name.removeprefix(PARAMETER): value for name, value in options.items() if name.startswith(PARAMETER)
    }  # fmt: skip
    if names := ",".join(devices_of(options, "NIXL")):
        if options.get("backend", "UCX") != "UCX":
            raise _wrong("devices", names, f"only UCX takes it; for others see '{PARAMETER}<name>'")
        found["ucx_devices"] = names
    mode = options.get("ucx_error_handling_mode")
    if mode is not None:
        if mode not in _ERROR_MODES:
            raise _wrong("ucx_error_handling_mode", mode, f"one of {', '.join(_ERROR_MODES)}")
        found["ucx_error_handling_mode"] = mode
    if "num_workers" in options:
        found["num_workers"] = str(number_of(options, "num_workers", 1, "NIXL", most=_MAX_WORKERS))
    return found


def _wrong(name: str, text: str, hint: str) -> ConfigError:
    return wrong(name, text, hint, "NIXL")
