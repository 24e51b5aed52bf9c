"""Tries the NIXL engine between two processes of this host, so that nothing that its library does reaches this one."""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from kvferry.engines.child import Child
from kvferry.engines.findings import Finding
from kvferry.engines.nixl.tryout_child import PATTERN_BYTES

_CHILD = "kvferry.engines.nixl.tryout_child"
_SAY_TRANSPORTS = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "stderr"}
_PUT = "remote memory write by ucp_put"
_LANE = re.compile(r"\b([a-z0-9_]+/[\w.:]+)")


def tryout() -> list[Finding]:
    """Have one process write to another, and read what they say of library and transports. Takes a second or two."""
    with tempfile.TemporaryFile() as said:
        try:
            findings = _tried(said)
        except (OSError, ValueError) as error:
            findings = [Finding("transfer", False, f"it could not be tried: {error}")]
        said.seek(0)
        return findings + _transports(said.read().decode(errors="replace"))


def _tried(said: IO[bytes]) -> list[Finding]:
    with Child(_CHILD, "target") as target, Child(_CHILD, "writer", environment=_SAY_TRANSPORTS, errors=said) as writer:
        hello = target.hear()
        if hello["why"]:
            return [Finding("library", False, hello["why"])]
        return [*_facts(hello), _transfer(hello, target, writer)]


def _facts(hello: Mapping[str, Any]) -> list[Finding]:
    plugins = ", ".join(hello["plugins"])
    return [
        Finding("library", True, f"{hello['library']}; an agent with the backend UCX was created", hello["library"]),
        Finding("plugins", None, f"backends that come with it, which may need more than is here: {plugins}", plugins),
    ]


def _transfer(hello: Mapping[str, Any], target: Child, writer: Child) -> Finding:
    pattern = secrets.token_hex(PATTERN_BYTES)
    why = writer.ask({"pattern": pattern, "blob": hello["blob"], "address": hello["address"]})["why"]
    if not why and target.ask({})["bytes"] != pattern:
        why = "the bytes that were written are not those that arrived"
    return Finding("transfer", not why, why or f"{PATTERN_BYTES} bytes written into another process were found there")


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
