"""What runs in the guests, the longest first."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv/bin/python"
# the wheel brings one of its own, which finds no device's driver on Debian
OWN_VERBS = f"""for copy in {ROOT}/.venv/lib/python3*/site-packages/nixl_cu*.libs/libibverbs-*; do
    mount --bind /usr/lib/x86_64-linux-gnu/libibverbs.so.1 "$copy"
done"""
NIXL = {
    # without it UCX takes shared memory on one host
    "UCX_TLS": "rc_verbs,ud_verbs",
    # how often it tries is the engine's own default, which is to be seen here; but not for a second each time
    "UCX_RC_VERBS_TIMEOUT": "250ms",
}

MORI_PYTHON = ROOT / ".venv-mori/bin/python"
# MORI looks for the PCI address of a network device in its path of sysfs, for ever if there is none
AS_PCI = "/run/0000:00:02.0/sys"
MORI_BEFORE = f"mkdir -p {AS_PCI}; mount -t sysfs sys {AS_PCI}"
MORI = {
    "LD_LIBRARY_PATH": str(ROOT / ".venv-mori/standin"),
    "HIP_STANDIN_DEVICES": "0",
    "SYSFS_PATH": AS_PCI,
    "MORI_IO_CP_TIMEOUT_MS": "60000",
}

# A process takes seconds to start in a guest, so that by itself the lab runs one row of each kind: exactness and LANDED
# here and in another process, what proves quiet, a killed target, a killed writer, and a whole run.
ROWS = " or ".join(
    (
        "landed", "any_size", "add_up", "touch", "roce_packets", "stopped_writer_lands and at_once", "end_of_its_agent",
        "writer_was_killed", "without_the_capability", "cut_by_a_detach", "killed_in_the_middle",
        "writer_that_is_killed", "port_that_was_lost", "never_sleep", "whole_run",
    )
)  # fmt: skip
WHOLE = "--whole"
"""Runs all rows of the groups."""


class Job(NamedTuple):
    """One run of pytest.

    Attributes:
        name: of the engine, which is required; its files in the shared folder are called after it.
        python: the interpreter, of an environment that has the engine's library.
        environment: variables.
        arguments: of pytest.
        limit_s: when it is ended.
        before: commands of the guest's shell that make it ready.
        made_by: what makes the interpreter's environment.
    """

    name: str
    python: Path
    environment: dict[str, str]
    arguments: list[str]
    limit_s: int = 1200
    before: str = ""
    made_by: str = "make engines"


JOBS = [
    Job("mori", MORI_PYTHON, MORI, ["tests/rdma/test_mori.py"], before=MORI_BEFORE, made_by="make mori"),
    Job("mooncake", PYTHON, {}, ["tests/rdma/test_mooncake.py"]),
    Job("nixl", PYTHON, NIXL, ["tests/rdma/test_nixl.py"], before=OWN_VERBS),
]
