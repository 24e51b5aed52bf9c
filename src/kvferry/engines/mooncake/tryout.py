"""What of Mooncake is installed, and whether two processes of this host can transfer with it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from typing import Any

from kvferry.engines.findings import Finding
from kvferry.engines.mooncake import library
from kvferry.engines.mooncake.instance import network_devices
from kvferry.engines.mooncake.tryout_child import PATTERN_BYTES

ANSWER_S = 30.0


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
    names = network_devices()
    found = f"RDMA devices: {', '.join(names)}" if names else "no RDMA device is found here, so that it uses TCP"
    forced = "; MC_FORCE_TCP is set, so that it uses TCP" if names and "MC_FORCE_TCP" in os.environ else ""
    return Finding("rdma_devices", None, found + forced, len(names))


def _transfer() -> Finding:
    try:
        why = _why_not()
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        why = f"it could not be tried: {error!r}"
    return Finding("transfer", not why, why or f"{PATTERN_BYTES} bytes written into another process were found there")


def _why_not() -> str:
    """Let a child write into the pool of another one, and compare what it finds there."""
    pattern = secrets.token_hex(PATTERN_BYTES)
    target = subprocess.Popen(  # noqa: S603 - our own module, no shell
        _command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
    )
    try:
        assert target.stdout is not None
        hello = _record(target.stdout.readline())
        written = subprocess.run(  # noqa: S603 - our own module, no shell
            _command(hello["blob"], str(hello["address"]), pattern), env=_environment(), timeout=ANSWER_S, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        why: str = _record(written.stdout)["why"]
        found = _record(target.communicate(b"\n", timeout=ANSWER_S)[0])["bytes"]
        return why or ("" if found == pattern else "the bytes that were written are not those that arrived")
    finally:
        target.kill()
        target.communicate()


def _record(line: bytes) -> dict[str, Any]:
    if not line:
        raise ChildProcessError("a child process ended without an answer")
    record: dict[str, Any] = json.loads(line)
    return record


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvferry.engines.mooncake.tryout_child", *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
