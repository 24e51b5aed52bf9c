"""Tries each mechanism of the local engine between two processes of this host, and reads what limits them."""

from __future__ import annotations

import resource
import secrets
from pathlib import Path
from typing import Any

from kvferry.engines.child import Child
from kvferry.engines.findings import Finding
from kvferry.engines.local.tryout_child import MECHANISMS, PATTERN_BYTES
from kvferry.errors import PoolError
from kvferry.pool import KINDS, allocate_pool

_CHILD = "kvferry.engines.local.tryout_child"
_POOL_BYTES = 4 << 20
_SCOPES = {
    0: "a process may be traced by others of its user",
    1: "a process may be traced by its ancestors only, so that cma needs CAP_SYS_PTRACE",
    2: "a process may be traced with CAP_SYS_PTRACE only, and so it is with cma",
    3: "no process may be traced, so that cma can't work",
}


def tryout() -> list[Finding]:
    """Try all mechanisms, then the page sizes of pools, then read limits. Takes a second or two; raises nothing."""
    return [*_mechanisms(), *map(_pages, KINDS), _ptrace_scope(), *_limits()]


def _mechanisms() -> list[Finding]:
    try:
        with Child(_CHILD, "target") as target, Child(_CHILD, "writer") as writer:
            hello = target.hear()
            return [_tried(mechanism, hello, target, writer) for mechanism in MECHANISMS]
    except (OSError, ValueError) as error:
        return [Finding(mechanism, False, f"it could not be tried: {error}") for mechanism in MECHANISMS]


def _tried(mechanism: str, hello: dict[str, Any], target: Child, writer: Child) -> Finding:
    if mechanism == "shm" and hello["why_no_memfd"]:
        return Finding(mechanism, False, hello["why_no_memfd"])
    pattern = secrets.token_hex(PATTERN_BYTES)
    address = {"blob": hello["blob"], "address": hello["address"]}
    why = writer.ask({"mechanism": mechanism, "pattern": pattern, **address})["why"]
    if not why and target.ask({})["bytes"] != pattern:
        why = "the bytes that were written are not those that arrived"
    text = why or f"{PATTERN_BYTES} bytes written into another process were found there"
    return Finding(mechanism, not why, text)


def _pages(kind: str) -> Finding:
    try:
        with allocate_pool(_POOL_BYTES, kind=kind) as pool:
            size = pool.page_bytes
    except PoolError as error:
        return Finding(f"{kind}_page_bytes", False, str(error))
    return Finding(f"{kind}_page_bytes", None, f"a {kind} pool lies on pages of {size >> 10} KiB", size)


def _ptrace_scope() -> Finding:
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return Finding("ptrace_scope", None, "the kernel has no Yama: users and capabilities alone decide")
    return Finding("ptrace_scope", None, f"Yama's ptrace_scope is {scope}: {_SCOPES.get(scope, 'unknown')}", scope)


def _limits() -> list[Finding]:
    wanted = (
        ("memlock_bytes", resource.RLIMIT_MEMLOCK, "bytes of locked memory (ulimit -l); this engine locks none"),
        ("open_files", resource.RLIMIT_NOFILE, "open files (ulimit -n)"),
    )
    return [_limit(key, resource.getrlimit(number)[0], text) for key, number, text in wanted]


def _limit(key: str, soft: int, text: str) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return Finding(key, None, f"no limit on {text}", None)
    return Finding(key, None, f"at most {soft} {text}", soft)
