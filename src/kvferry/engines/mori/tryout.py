"""What of MORI is installed, what it finds on this host, and whether two processes of it can transfer by RDMA."""

from __future__ import annotations

from kvferry.engines.findings import Finding
from kvferry.engines.mori import library, precautions
from kvferry.engines.tryout import FAILURES, could_not_be_tried, siblings
from kvferry.errors import EngineUnavailable

PATTERN_BYTES = 4096
_HOST = "127.0.0.1"


def tryout() -> list[Finding]:
    """Look and try, in processes of their own; takes some seconds with RDMA, raises nothing."""
    version = library.version()
    return [Finding("version", None, f"the library is {version}", version.rpartition(" ")[2]), _xgmi(), *_rdma()]


def _xgmi() -> Finding:
    try:
        gpus = precautions.ask_child("xgmi", _HOST)["gpus"]
    except EngineUnavailable as error:
        return could_not_be_tried("xgmi", error)
    return Finding("xgmi", gpus > 0, f"HIP finds {gpus} devices; it moves GPU memory between processes of a host", gpus)


def _rdma() -> list[Finding]:
    devices = precautions.active_devices()
    if not devices:
        return [Finding("rdma", False, "no RDMA device with a port that is up")]
    try:
        precautions.try_backend("rdma", _HOST)
    except EngineUnavailable as error:
        return [Finding("rdma", False, error.message, ", ".join(devices))]
    found = Finding("rdma", True, f"RDMA devices: {', '.join(devices)}; the backend was created", ", ".join(devices))
    try:
        with siblings("mori", PATTERN_BYTES, {"MORI_DISABLE_AUTO_XGMI": "1"}) as pair:
            return [found, pair.finding("transfer", pair.hello["why"] or pair.write({"backend": "rdma"}))]
    except FAILURES as error:
        return [found, could_not_be_tried("transfer", error)]
