"""Whether a process has ended: only what the kernel says, and never of another process."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading

import msgspec

from kvferry.engines import host
from kvferry.engines.host import Process, has_ended, host_identity, this_process

ONLY_A_THREAD_LEFT = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone
"""


def described(pid):
    return Process(host_identity(), pid, host._started(pid))


def test_this_process_lives():
    mine = this_process()
    assert mine == described(os.getpid())
    assert not has_ended(mine)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(mine), type=Process) == mine


def test_a_process_has_ended_when_it_was_killed_also_before_anybody_waits_for_it():
    child = subprocess.Popen(["sleep", "60"])
    known = described(child.pid)
    assert not has_ended(known)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert not has_ended(known), "a stopped process goes on"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(known)
    child.wait()
    assert has_ended(known)


def test_a_process_whose_first_thread_has_ended_lives_on():
    with subprocess.Popen([sys.executable, "-c", ONLY_A_THREAD_LEFT], stdout=subprocess.PIPE) as child:
        known = described(child.pid)
        assert child.stdout.readline() == b"ready\n"
        threading.Event().wait(0.2)
        assert not has_ended(known)
        child.kill()
        child.wait()
    assert has_ended(known)


def test_a_number_that_is_used_again_is_another_process():
    mine = this_process()
    assert has_ended(msgspec.structs.replace(mine, started=mine.started - 1))


def test_nothing_is_known_of_other_hosts(monkeypatch):
    assert not has_ended(Process("elsewhere", 2**31 - 1, 1))
    monkeypatch.setattr(host, "host_identity", lambda: "")
    assert this_process() is None


def test_many_open_descriptors_are_no_obstacle(monkeypatch):
    """select() takes none from 1024 on."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    opens = os.pidfd_open

    def high(pid):
        fd = opens(pid)
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD, 1024)
        finally:
            os.close(fd)

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limit[1]), limit[1]))
    monkeypatch.setattr(os, "pidfd_open", high)
    try:
        assert not has_ended(this_process())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
