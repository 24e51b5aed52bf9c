"""Run each job in a virtual machine of its own and say what came of it: lab.py [--whole] [NAME ...].

As many machines run at once as there are processors.
"""

import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jobs import JOBS, ROOT, ROWS, WHOLE, Job

HERE = Path(__file__).parent
SKIPPED = 77
BOOT_S = 60
PYTEST = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def folder() -> Path:
    """Where what was downloaded is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("KVFERRY_RDMA_LAB") or cache / "kvferry-rdma-lab")


def line_of(job: Job, rows: list[str]) -> str:
    """The commands of a job, for the guest's shell."""
    pytest = [job.python, "-m", "pytest", "-m", "rdma", "-p", "no:cacheprovider", "-q", "--durations=12"]
    plugins = ["-p", "pytest_timeout", "-p", "kvferry.testing.plugin"]  # importing all of them takes half a minute
    limits = ["--timeout", "300", "-o", "faulthandler_timeout=0"]
    kvferry = ["--kvferry-require", job.name, f"--kvferry-matrix=/lab/{job.name}.json"]
    variables = [f"{name}={value}" for name, value in {**PYTEST, **job.environment}.items()]
    command = ["run", job.name, job.limit_s, "env", *variables, *pytest, *plugins, *limits, *kvferry]
    return f"{job.before}\n{shlex.join(map(str, [*command, *job.arguments, *rows]))}"


def boot(job: Job, rows: list[str], folder: Path, shared: Path) -> int:
    """Write the guest's job, run it, and return what QEMU's script does."""
    shared.mkdir(parents=True, exist_ok=True)
    for old in shared.glob("*"):
        old.unlink()
    lines = [f"cd {shlex.quote(str(ROOT))}", f". {shlex.quote(str(HERE / 'guest.sh'))}", line_of(job, rows), "exit 0"]
    (shared / "job.sh").write_text("\n".join(lines) + "\n")
    return subprocess.run([HERE / "boot.sh", folder, shared, str(BOOT_S + job.limit_s)], check=False).returncode


def verdict(job: Job, shared: Path) -> bool:
    """Say what a job has shown; whether that is all it had to."""
    try:
        code, seconds, packets = map(int, (shared / f"{job.name}.result").read_text().split())
    except (OSError, ValueError):
        print(f"rdma lab: {job.name}: it did not come to an end, see {shared}")
        return False
    good = code == 0 and packets > 0
    if not good:
        print((shared / f"{job.name}.log").read_text(errors="replace"))
    print(f"rdma lab: {job.name}: {'passed' if good else f'FAILED ({code})'} in {seconds} s, {packets} RoCE packets")
    return good


def chosen(names: list[str]) -> list[Job]:
    """The jobs of these names, or all; without those whose interpreter is not here, which is said."""
    jobs = [job for job in JOBS if job.name in names or not names]
    for job in jobs:
        if not job.python.exists():
            print(f"rdma lab: {job.name}: skipped: there is no {job.python.relative_to(ROOT)} ({job.made_by})")
    return [job for job in jobs if job.python.exists()]


def main(names: list[str]) -> int:
    began = time.monotonic()
    prepared = subprocess.run([HERE / "prepare.sh", folder()], check=False).returncode
    if prepared:
        return 0 if prepared == SKIPPED else prepared
    ready_s = time.monotonic() - began
    rows = [] if WHOLE in names else ["-k", ROWS]
    jobs, shared = chosen([name for name in names if name != WHOLE]), ROOT / ".pytest_cache/rdma"
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as at_once:  # a guest has one processor
        ended = list(at_once.map(lambda job: boot(job, rows, folder(), shared / job.name), jobs))
    results = [verdict(job, shared / job.name) for job in jobs]
    took = f"{time.monotonic() - began:.0f} s in all, {ready_s:.0f} s of them to prepare"
    print(f"rdma lab: {took}; the guests ended with {', '.join(map(str, ended))}")
    return 0 if not any(ended) and all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
