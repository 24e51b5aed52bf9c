"""The library `mori.cpp`: importing it, what it lacks, its version, and its settings in the environment."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import sys
from typing import Any, NoReturn

from kvferry.engines.mori.options import Options
from kvferry.errors import ConfigError, EngineUnavailable

WHEEL = "amd-mori==1.2.4"
PYTHONS = ("3.10", "3.12")
"""Versions of Python that the library has wheels for."""

ROCM = {"libamdhip64.so.7": "ROCm 7's HIP runtime", "libhsa-runtime64.so.1": "ROCm 7's HSA runtime"}
DEBIAN = {
    "libpci.so.3": "libpci3",
    "libdrm.so.2": "libdrm2",
    "libdrm_amdgpu.so.1": "libdrm-amdgpu1",
    "libnuma.so.1": "libnuma1",
}
"""Shared libraries that all wheels expect on the system, and what has them."""
RPC = {
    "3.10": {"libprotobuf.so.23": "libprotobuf23", "libgrpc++.so.1": "libgrpc++1"},
    "3.12": {"libprotobuf.so.32": "libprotobuf32", "libgrpc++.so.1.51": "libgrpc++1.51"},
}
"""The same by version of Python: what the distributions had that the wheels were built on."""

_ROCM_FOLDER = "/opt/rocm/lib/"

INSTALL = f"pip install {WHEEL} with Python {' or '.join(PYTHONS)}; it needs ROCm 7 and {', '.join(DEBIAN.values())}"

_STREAMS = 2
"""Of each engine by XGMI, and as many events: it has one transfer at a time."""

_INBOUND = "MORI_IO_ENABLE_NOTIFICATION"


def check_installed() -> None:
    """Look whether the library can be imported, without doing so.

    Raises:
        EngineUnavailable: it is not installed, or a library that it needs is missing; says which.
    """
    if importlib.util.find_spec("mori") is None:
        running = python_version()
        fits = (
            "" if running in PYTHONS else f"; it has wheels for Python {' and '.join(PYTHONS)} alone, this is {running}"
        )
        _unavailable(f"there is no module mori{fits}")
    lacking = missing_libraries()
    if lacking:
        named = ", ".join(f"{file} ({origin})" for file, origin in lacking.items())
        _unavailable(f"these shared libraries are missing: {named}")


def load() -> Any:
    """Import the library's bindings and return the module; raises EngineUnavailable.

    It is the layer below `mori.io`, which has the same calls and needs torch for the name of a type.
    """
    # it writes to the standard output, where commands print their results; what fails is told by the tickets
    os.environ.setdefault("MORI_GLOBAL_LOG_LEVEL", "critical")
    try:
        from mori import cpp
    except Exception as error:  # noqa: BLE001 - whatever foreign code raises concerns this engine alone
        _unavailable(f"{type(error).__name__}: {error}")
    return cpp


def backend_of(cpp: Any, name: str) -> tuple[Any, Any]:
    """A backend's type and settings, as `CreateBackend` takes them."""
    if name == "xgmi":
        return cpp.BackendType.XGMI, cpp.XgmiBackendConfig(_STREAMS, _STREAMS)
    config = cpp.RdmaBackendConfig()
    config.enable_notification = False
    config.num_worker_threads = 1
    return cpp.BackendType.RDMA, config


def python_version() -> str:
    """Of this interpreter, as wheels name it."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def missing_libraries() -> dict[str, str]:
    """The shared libraries that are not found on this system, and what has them."""
    needed = {**ROCM, **DEBIAN, **RPC.get(python_version(), {})}
    return {file: origin for file, origin in needed.items() if not _loads(file)}


@functools.cache
def version() -> str:
    """The installed distribution's name and version; "" if there is none."""
    names = importlib.metadata.packages_distributions().get("mori", [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else ""


def check_environment() -> None:
    """Refuse settings of the library under which this engine's outcomes would not be true.

    Raises:
        ConfigError: a variable, which it names, has such a value.
    """
    if os.environ.get("MORI_DISABLE_AUTO_XGMI", "").startswith("0"):
        raise ConfigError(
            "MORI_DISABLE_AUTO_XGMI=0 lets MORI write by XGMI beside RDMA, and then a fence proves nothing",
            hint="unset it; option backend=xgmi chooses XGMI",
        )
    if os.environ.get(_INBOUND, "0").lower() not in {"0", "false", "off", "no"}:
        raise ConfigError(
            f"{_INBOUND} is {os.environ[_INBOUND]!r}: the library's table of inbound transfers would never shrink",
            hint="unset it",
        )


def set_environment(options: Options) -> None:
    """Hand settings to the library by the environment of the process, which it reads when a backend is created."""
    wanted = {
        "MORI_IO_QP_RETRY_CNT": str(options.qp_retry_count),
        "MORI_IO_POLL_CQ_MODE": options.poll_cq_mode,
        "MORI_IO_QP_PER_TRANSFER": str(options.qp_per_transfer),
        _INBOUND: "0",
    }
    if options.devices:
        wanted["MORI_RDMA_DEVICES"] = options.devices
    for name, value in wanted.items():
        # the library's threads read the environment without a lock: it is written only where it changes
        if os.environ.get(name) != value:
            os.environ[name] = value


def gpu_count() -> int:
    """How many devices HIP finds; after `load`, which has loaded HIP."""
    count = ctypes.c_int(0)
    failed = _hip().hipGetDeviceCount(ctypes.byref(count))
    return 0 if failed else count.value


def _hip() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libamdhip64.so.7")
    except OSError:
        return ctypes.CDLL(f"{_ROCM_FOLDER}libamdhip64.so.7")


def _unavailable(why: str) -> NoReturn:
    glibc = f" (the wheel for 3.12 needs glibc 2.39, this is {platform.libc_ver()[1]})" if "GLIBC" in why else ""
    raise EngineUnavailable(f"MORI can't be imported: {why}{glibc}", hint=INSTALL)


def _loads(file: str) -> bool:
    for place in (file, f"{_ROCM_FOLDER}{file}"):
        try:
            ctypes.CDLL(place)
        except OSError:
            continue
        return True
    return False
