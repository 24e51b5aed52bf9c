"""What of Mooncake is installed, and whether two processes of this host can transfer with it."""

from __future__ import annotations

import os

from kvferry.engines.devices import rdma_devices
from kvferry.engines.findings import Finding
from kvferry.engines.mooncake import library
from kvferry.engines.tryout import FAILURES, could_not_be_tried, siblings

PATTERN_BYTES = 4096


def tryout() -> list[Finding]:
    """Look and try; takes a second, raises nothing."""
    lacking = library.missing_packages()
    packages = f"missing: apt-get install {' '.join(lacking)}" if lacking else ", ".join(library.DEBIAN.values())
    version = library.version()
    return [
        Finding("version", None, f"the library is {version}", version.rpartition(" ")[2]),
        Finding("debian_packages", not lacking, packages),
        _devices(),
        _transfer(),
    ]


def _devices() -> Finding:
    names = rdma_devices()
    found = f"RDMA devices: {', '.join(names)}" if names else "no RDMA device is found here, so that it uses TCP"
    forced = "; MC_FORCE_TCP is set, so that it uses TCP" if names and "MC_FORCE_TCP" in os.environ else ""
    return Finding("rdma_devices", None, found + forced, len(names))


def _transfer() -> Finding:
    try:
        with siblings("mooncake", PATTERN_BYTES) as pair:
            return pair.finding("transfer", pair.hello["why"] or pair.write())
    except FAILURES as error:
        return could_not_be_tried("transfer", error)
