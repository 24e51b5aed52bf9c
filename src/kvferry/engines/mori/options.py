"""The MORI engine's own settings, given as text (KVFERRY_ENGINE_OPTIONS=name=value,...)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from kvferry.engines import devices
from kvferry.engines.devices import devices_of
from kvferry.engines.option_text import check_known, seconds_of, wrong
from kvferry.errors import ConfigError

KNOWN = (
    "backend", *devices.OPTIONS, "attach_timeout_s", "transfer_timeout_s", "qp_retry_count", "poll_cq_mode",
    "qp_per_transfer",
)  # fmt: skip
BACKENDS = ("auto", "rdma", "xgmi")
ENDLESS_RETRY = 7
"""With that many retries a write to a peer that died may never end: soft RoCE takes it for "for ever"."""

_DEFAULT_RETRY = 6
_POLL_MODES = ("event", "polling")
_MOST_QPS = 64


class Options(NamedTuple):
    """The settings.

    Attributes:
        backend: "rdma", "xgmi", or "auto": RDMA where there is an active device, else XGMI.
        devices: names of network devices, with commas between them.
        attach_timeout_s: seconds until a peer that can't be written to yet is given up.
        transfer_timeout_s: seconds until a batch that is not over counts as failed.
        qp_retry_count: how often the network device sends again before it gives a peer up; 0 to 7.
        poll_cq_mode: how the library waits for completions: "event", or "polling", which keeps a core busy per peer.
        qp_per_transfer: queue pairs of a transfer.
    """

    backend: str = "auto"
    devices: str = ""
    attach_timeout_s: float = 15.0
    transfer_timeout_s: float = 30.0
    qp_retry_count: int = _DEFAULT_RETRY
    poll_cq_mode: str = "event"
    qp_per_transfer: int = 1


def parse(options: Mapping[str, str]) -> Options:
    """Read the settings: what is given here, or else by MORI's variables of the environment, or else the default.

    Raises:
        ConfigError: an unknown name, or a value that is none.
    """
    check_known(options, KNOWN, "mori")
    return Options(
        _one_of("backend", options.get("backend", "auto"), BACKENDS),
        ",".join(devices_of(options, "mori")) or os.environ.get("MORI_RDMA_DEVICES", ""),
        seconds_of(options, "attach_timeout_s", "15", "mori"),
        seconds_of(options, "transfer_timeout_s", "30", "mori"),
        _number(options, "qp_retry_count", "MORI_IO_QP_RETRY_CNT", _DEFAULT_RETRY, range(ENDLESS_RETRY + 1)),
        _one_of("poll_cq_mode", _given(options, "poll_cq_mode", "MORI_IO_POLL_CQ_MODE", "event").lower(), _POLL_MODES),
        _number(options, "qp_per_transfer", "MORI_IO_QP_PER_TRANSFER", 1, range(1, _MOST_QPS + 1)),
    )


def _given(options: Mapping[str, str], name: str, variable: str, default: str) -> str:
    return options.get(name) or os.environ.get(variable) or default


def _one_of(name: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise _wrong(name, text, f"one of {', '.join(known)}")
    return text


def _number(options: Mapping[str, str], name: str, variable: str, default: int, known: range) -> int:
    text = _given(options, name, variable, str(default))
    if not text.isdecimal() or int(text) not in known:
        raise _wrong(name, text, f"a number, {known[0]} to {known[-1]}; {variable} says it, too")
    return int(text)


def _wrong(name: str, text: str, hint: str) -> ConfigError:
    return wrong(name, text, hint, "mori")
