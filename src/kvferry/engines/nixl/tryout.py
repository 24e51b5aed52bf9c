"""Tries the NIXL engine between two processes of this host, so that nothing that its library does reaches this one."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from kvferry.engines.devices import rdma_devices
from kvferry.engines.findings import Finding
from kvferry.engines.nixl import library
from kvferry.engines.tryout import FAILURES, could_not_be_tried, siblings

PATTERN_BYTES = 65536
_SAY_TRANSPORTS = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "stderr"}
_PUT = "remote memory write by ucp_put"
_LANE = re.compile(r"\b([a-z0-9_]+/[\w.:]+)")


def tryout() -> list[Finding]:
    """Have one process write to another, and read what they say of library and transports. Takes a second or two."""
    with tempfile.TemporaryFile() as said:
        try:
            findings = _tried(said)
        except FAILURES as error:
            findings = [could_not_be_tried("transfer", error)]
        said.seek(0)
        return findings + _transports(said.read().decode(errors="replace"))


def _tried(said: IO[bytes]) -> list[Finding]:
    with siblings("nixl", PATTERN_BYTES, _SAY_TRANSPORTS, said) as pair:
        if why := pair.hello["why"]:
            return [Finding("library", False, why)]
        return [*_facts(pair.hello["info"]), pair.finding("transfer", pair.write())]


def _facts(info: Mapping[str, Any]) -> list[Finding]:
    plugins = ", ".join(info["plugins"])
    return [
        Finding("library", True, f"{info['library']}; an agent with the backend UCX was created", info["library"]),
        Finding("plugins", None, f"backends that come with it, which may need more than is here: {plugins}", plugins),
        *_rdma(),
    ]


def _rdma() -> list[Finding]:
    """What holds where there are RDMA devices."""
    names, retries = ", ".join(rdma_devices()), library.limit_retries()
    if not names:
        return []
    gives_up = f"a peer that does not answer is given up after {retries} retries ({library.RETRIES})"
    return [Finding("rdma_devices", None, f"RDMA devices: {names}; {gives_up}; no fence is claimed over them", names)]


def _transports(said: str) -> list[Finding]:
    """What UCX chose for writes to host memory, from the tables that it prints when it is asked to."""
    lanes: list[str] = []
    for tables in said.split(_PUT)[1:]:
        # behind the title: a rule, the headings, a rule, the rows, a rule, and then other tables
        parts = [part for part in tables.split("+-") if "|" in part]
        lanes += _LANE.findall(parts[2]) if len(parts) > 2 else []
    if not lanes:
        return []
    names = ", ".join(sorted(set(lanes)))
    return [Finding("transports", None, f"UCX writes to the other process's host memory by {names}", names)]
