"""Which host this is, and whether a process of it has ended."""

from __future__ import annotations

import hashlib
import os
import select
from pathlib import Path
from typing import Annotated

import msgspec


def host_identity() -> str:
    """Boot id, process and network namespace: where they are equal, a pid means the same process.

    Returns:
        A digest, or "" where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {spaces}".encode()).hexdigest()[:32]


class Process(msgspec.Struct, frozen=True):
    """A process, so that no later one is taken for it.

    Attributes:
        host: `host_identity` of where it runs.
        pid: its process id there.
        started: when it started, in clock ticks since the boot.
    """

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    started: int


def this_process() -> Process | None:
    """The caller's; None where the system does not say enough."""
    host, started = host_identity(), _started(os.getpid())
    return Process(host, os.getpid(), started) if host and started is not None else None


def has_ended(process: Process) -> bool:
    """Whether it is proven that a process of this host runs no more, with all its threads; False for other hosts."""
    if process.host != host_identity():
        return False
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        started = _started(process.pid)
        if started is not None and started != process.started:
            return True
        watch = select.poll()  # unlike select it takes any descriptor
        watch.register(fd, select.POLLIN)
        return bool(watch.poll(0))
    finally:
        os.close(fd)


def _started(pid: int) -> int | None:
    try:
        # the command's name may hold anything, also parentheses
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
