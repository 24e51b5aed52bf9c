"""What a figure depends on beside the code: load, versions, page size, memory of a process."""

from __future__ import annotations

import os
import platform
from typing import Any

import msgspec
import numpy as np
import zmq

import kvferry
from kvferry.config import Config, explain


def versions() -> dict[str, str]:
    """Versions of what runs, as far as a figure depends on them."""
    return {
        "kvferry": kvferry.__version__, "python": platform.python_version(), "kernel": platform.release(),
        "numpy": np.__version__, "pyzmq": zmq.__version__, "libzmq": zmq.zmq_version(), "msgspec": msgspec.__version__,
    }  # fmt: skip


def surroundings(config: Config) -> dict[str, Any]:
    """Load average, processors, versions, and the settings that are not the defaults, as of now."""
    chosen = {name: value for name, (value, source) in explain(config, {}).items() if source != "default"}
    return {
        "settings": chosen,
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "processors": len(os.sched_getaffinity(0)),
        "versions": versions(),
    }


def memory_kb() -> dict[str, int]:
    """Resident (rss), proportional (pss) and private memory of this process in KB, from /proc/self/smaps_rollup."""
    fields: dict[str, int] = {}
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if value.endswith("kB\n"):
                fields[name] = int(value.split()[0])
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {"rss": fields["Rss"], "pss": fields["Pss"], "private": private}
