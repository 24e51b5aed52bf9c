"""Tries each mechanism of the local engine between two processes of this host, and reads what limits them."""

from __future__ import annotations

import resource
from pathlib import Path

from kvferry.engines.findings import Finding
from kvferry.engines.tryout import FAILURES, Siblings, could_not_be_tried, siblings
from kvferry.errors import PoolError
from kvferry.pool import KINDS, allocate_pool

MECHANISMS = ("shm", "cma", "tcp")
PATTERN_BYTES = 4096
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
        with siblings("local", PATTERN_BYTES) as pair:
            return [_tried(mechanism, pair) for mechanism in MECHANISMS]
    except FAILURES as error:
        return [could_not_be_tried(mechanism, error) for mechanism in MECHANISMS]


def _tried(mechanism: str, pair: Siblings) -> Finding:
    if mechanism == "shm" and pair.hello["why_no_memfd"]:
        return Finding(mechanism, False, pair.hello["why_no_memfd"])
    why = pair.write({"mechanism": mechanism})
    return pair.finding(mechanism, why.removeprefix(f"can't attach: {mechanism}: "))


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
