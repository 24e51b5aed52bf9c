"""The fall-backs between real processes: without ptrace rights, in another namespace, as another user."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.engines.seam import Outcome
from kvferry.testing.suite import EngineSuite
from kvferry.testing.suite_memory import PLAIN

MEMFD = "kvferry.testing.suite_memory:memfd"
NO_PTRACE = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
NEW_PIDS = ("unshare", "--pid", "--fork", "--kill-child")
NEW_NET = ("unshare", "--net")
NOBODY = 65534
AS_NOBODY = f"""
import encodings.ascii, encodings.idna, os, sys  # while the interpreter can still be read
from kvferry.engines import find
from kvferry.testing import suite_memory, suite_process
find.load("local")
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
del sys.argv[1:4]
suite_process._main()
"""
CAP_SYS_PTRACE = 19


def can_lose_ptrace_rights():
    status = Path("/proc/self/status").read_text()
    return bool(int(status.split("CapEff:")[1].split()[0], 16) >> CAP_SYS_PTRACE & 1)


def works(*command):
    """Whether a program with its first options can be run here."""
    return shutil.which(command[0]) is not None and not subprocess.run([*command, "true"], check=False).returncode


needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is missing")
needs_ptrace = pytest.mark.skipif(
    not can_lose_ptrace_rights(), reason="no CAP_SYS_PTRACE here that could be taken away"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")


@pytest.fixture
def attached():
    """attached(prefix, memory, mechanism): a writer process started like this, and what it says of its attachment."""
    suite = EngineSuite()

    def start(prefix, memory=MEMFD, mechanism="auto"):
        suite.options, suite.memory = {"mechanism": mechanism}, memory
        suite.setup_method()
        process, target = suite.spawn(4096, prefix), suite.pair.target
        target.grant(process.peer)
        done = process.attach(target.me, target.engine.describe())
        explained = process.do("info")["info"]["peers"][str(target.me)]
        if done["outcome"] == Outcome.LANDED.value:
            answer = process.do("write", peer=[2, 0], claim=7, dst=target.address, fill=0x33)
            assert answer["outcome"] == Outcome.LANDED.value
            assert (target.pool[:4096] == 0x33).all()
            assert list(target.engine.info()["writers"].values()) == [explained.split()[0]]
        return done, explained

    yield start
    suite.teardown_method()


def reasons(explained):
    """{"": what is used, "shm": why not, ...}."""
    used, *others = explained.split("; ")
    found, last = {"": used}, ""
    for part in others:
        name, colon, text = part.partition(": ")
        if colon and name in {"shm", "cma", "tcp"}:
            last, found[name] = name, text
        else:
            found[last] += f"; {part}"
    return found


@needs_setpriv
@needs_ptrace
def test_without_ptrace_rights_shared_pools_are_written_all_the_same(attached):
    _, explained = attached(NO_PTRACE)
    assert explained == "shm (ready)"


@needs_setpriv
@needs_ptrace
@pytest.mark.parametrize("memory", [PLAIN, "kvferry.testing.suite_memory:private"])
def test_without_ptrace_rights_private_memory_is_written_by_tcp_and_both_reasons_are_kept(attached, memory):
    _, explained = attached(NO_PTRACE, memory)
    found = reasons(explained)
    assert found[""] == "tcp (ready)"
    assert "not in a shared pool" in found["shm"]
    assert "EPERM" in found["cma"]
    assert "ptrace rights are missing" in found["cma"]


@needs_setpriv
@needs_ptrace
def test_without_ptrace_rights_cross_memory_attach_alone_is_refused_with_eperm(attached):
    done, explained = attached(NO_PTRACE, MEMFD, "cma")
    assert done["outcome"] == Outcome.FAILED_QUIET.value
    assert "EPERM" in done["cause"]
    assert "EPERM" in explained


@pytest.mark.skipif(not works(*NEW_PIDS), reason="unshare --pid does not work here")
@pytest.mark.parametrize("memory", [PLAIN, MEMFD])
def test_from_another_pid_namespace_it_is_tcp(attached, memory):
    _, explained = attached(NEW_PIDS, memory)
    found = reasons(explained)
    assert found[""] == "tcp (ready)"
    assert "another process or network namespace" in found["cma"]
    assert ("another process or network namespace" if memory == MEMFD else "not in a shared pool") in found["shm"]


@pytest.mark.skipif(not works(*NEW_NET), reason="unshare --net does not work here")
def test_from_another_network_namespace_nothing_of_this_host_is_reached_and_every_reason_is_kept(attached):
    done, explained = attached(NEW_NET)
    assert done["outcome"] == Outcome.FAILED_QUIET.value
    found = reasons(explained)
    assert "another process or network namespace" in found["cma"]
    assert "another process or network namespace" in found["shm"]
    assert "can't be reached" in found["tcp"]


@needs_root
@pytest.mark.parametrize("memory", [PLAIN, MEMFD])
def test_as_another_user_it_is_tcp(attached, memory):
    _, explained = attached((sys.executable, "-c", AS_NOBODY), memory)
    found = reasons(explained)
    assert found[""] == "tcp (ready)"
    assert f"runs as user {os.geteuid()}, this process as {NOBODY}" in found["cma"]
    assert ("runs as user" if memory == MEMFD else "not in a shared pool") in found["shm"]
