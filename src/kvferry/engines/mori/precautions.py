"""What would end this process, or never return, inside the library: looked at before it is called.

It leaves by `exit` where it can't bind its port, and where it finds no ROCm SMI or no GPU by it; by `abort` where
memory can't be registered, which it does late, when a peer asks; and it looks for ever for the PCI address of a network
device that has none. What can't be known by looking is tried in a child process first.
"""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.engines.child import Child
from kvferry.engines.intervals import Intervals
from kvferry.engines.seam import Region
from kvferry.errors import EngineError, EngineUnavailable

DEVICES = Path("/sys/class/infiniband")
TRIED = "KVFERRY_MORI_TRIED"
"""Variable of the environment that says what was tried well, so that child processes don't try it again."""

TRIAL_S = 60.0
"""With many devices the library needs seconds; one that it looks for in vain keeps it for ever."""

_CHILD = "kvferry.engines.mori.backend_child"
_SAID_BYTES = 500
_CAP_IPC_LOCK = 14
_SETTINGS = ("MORI_", "SYSFS_PATH", "LD_LIBRARY_PATH")


def active_devices() -> list[str]:
    """RDMA devices of this system with a port that is up."""
    try:
        return sorted({path.parts[-4] for path in DEVICES.glob("*/ports/*/state") if "ACTIVE" in path.read_text()})
    except OSError:
        return []


def bindable(host: str, ports: tuple[int, int]) -> int:
    """A port that the library can listen on; 0 lets it choose.

    Args:
        host: the address to listen on.
        ports: (first, last) port to try; (0, 0): any.

    Raises:
        EngineError: the address is not IPv4, or not of this host, or no such port is free.
    """
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        raise EngineError(
            f"MORI can't listen on {host!r}: it takes IPv4 addresses alone", hint="set KVFERRY_BIND_HOST to one"
        ) from None
    failed: OSError | None = None
    for port in range(ports[0], ports[1] + 1):
        with socket.socket(socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, port))
                trial.listen()  # a port that is listened on can be bound to, with this option
            except OSError as error:
                failed = error
                continue
        return port
    raise EngineError(
        f"MORI can't listen on {host}, ports {ports[0]} to {ports[1]}: {failed}",
        hint="choose an address of this host (KVFERRY_BIND_HOST), or other ports (KVFERRY_DATA_PORTS)",
    )


def check_host_memory(regions: Sequence[Region]) -> None:
    """Refuse host memory that a network device could not be given.

    Raises:
        EngineError: a region, which it names, is not mapped for writing, or all of them are more than may be locked.
    """
    host = [(number, region) for number, region in enumerate(regions) if region.device < 0 and region.nbytes]
    mapped = _writable()
    for number, region in host:
        row = np.array([region.address], np.uint64), np.array([region.nbytes], np.uint64)
        if mapped is not None and mapped.first_outside(*row) is not None:
            raise EngineError(
                f"region {number}, {region.nbytes} bytes at {region.address:#x}, is not mapped for writing here"
            )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    wanted = sum(region.nbytes for _, region in host)
    if limit != resource.RLIM_INFINITY and wanted > limit and not _may_lock():
        raise EngineError(
            f"{wanted} bytes of memory are to be registered, and this process may lock {limit}",
            hint="raise the limit: ulimit -l unlimited",
        )


def try_backend(backend: str, host: str) -> None:
    """Have a child process create an engine with this backend, unless that went well before.

    Raises:
        EngineUnavailable: it ended or hung; says what the library said.
    """
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS))
    this = f"{backend} {host} {settings}"
    if os.environ.get(TRIED) != this:
        ask_child(backend, host)
        os.environ[TRIED] = this


def ask_child(backend: str, host: str) -> dict[str, Any]:
    """Have a child process create an engine with this backend; gives what it found, "gpus" among it.

    Raises:
        EngineUnavailable: it ended or hung, or the library refused; says what the library said.
    """
    with tempfile.TemporaryFile() as said, Child(_CHILD, backend, host, errors=said) as child:
        try:
            answer = child.hear(TRIAL_S)
            why = answer["why"]
        except (OSError, ValueError) as error:
            answer, why = {}, str(error)
        said.seek(0)
        words = " ".join(said.read().decode(errors="replace").split())[-_SAID_BYTES:]
    if why:
        raise EngineUnavailable(
            f"MORI's backend {backend} can't be created here; tried in a process of its own: {why}"
            f"{f' ({words})' if words else ''}",
            hint="with RDMA it needs ROCm SMI and a GPU, and a network device with a PCI address: see docs/mori.md",
        )
    return answer


def _writable() -> Intervals | None:
    """The memory that this process may write; None where the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    spans = [line.split()[0].split("-") for line in lines if line.split()[1].startswith("rw")]
    bounds = np.array([[int(start, 16), int(end, 16)] for start, end in spans], np.uint64).reshape(-1, 2)
    return Intervals.merged(bounds[:, 0], bounds[:, 1])


def _may_lock() -> bool:
    """Whether the limit on locked memory does not hold for this process."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)
