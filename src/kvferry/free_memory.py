"""How much memory this process may still take: what the kernel calls available, within the limits of its cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = ["FreeMemory", "free_memory"]

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


class FreeMemory(NamedTuple):
    """What is free.

    Attributes:
        nbytes: bytes; caches that the kernel would give back count as free.
        where: what has only so much: "this machine", or the cgroup.
    """

    nbytes: int
    where: str


def free_memory(root: Path = Path("/")) -> FreeMemory | None:
    """The least that is free on the machine and in each cgroup that the process is in; None if nothing is known.

    Args:
        root: where proc and sys are mounted; for tests.
    """
    found = list(_of_cgroups(root))
    available = _line(root / "proc/meminfo", "MemAvailable:")
    if available is not None:
        found.append(FreeMemory(available << 10, "this machine"))
    return min(found, default=None)


def _of_cgroups(root: Path) -> Iterator[FreeMemory]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _upwards(root / "sys/fs/cgroup", path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _upwards(root / "sys/fs/cgroup/memory", path, names)


def _upwards(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[FreeMemory]:
    # a container may see only its own part of the tree: what can't be read is skipped
    inner = PurePosixPath(path.lstrip("/"))
    for group in (inner, *inner.parents):
        limit, used = (_number(mount / group / name) for name in names[:2])
        if limit is None or used is None or limit > _UNLIMITED:
            continue
        cached = _line(mount / group / "memory.stat", names[2]) or 0
        yield FreeMemory(max(limit - used + cached, 0), f"cgroup /{'' if str(group) == '.' else group}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _line(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None
