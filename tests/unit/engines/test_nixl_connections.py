"""What a process that has ended left on the way by TCP, with real sockets and processes."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import time

import pytest

from kvferry.engines.nixl import connections
from kvferry.engines.nixl.connections import awaits_acceptance, own_sockets

SENDER = """
import os, socket, sys, time
family, port, nbytes, holder = getattr(socket, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with socket.socket(family) as each:
    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
    each.connect(("::1" if family == socket.AF_INET6 else "127.0.0.1", port))
    each.setblocking(False)
    sent = each.send(bytes(nbytes))
    if holder == "forks" and not os.fork():
        os.setsid()
        time.sleep(30)
        os._exit(0)
    print(sent, flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def sending(nbytes, holder="", family="AF_INET", say=b""):
    """A socket of ours, small, and a process that has sent it so much, was killed, and is gone."""
    host = "::1" if family == "AF_INET6" else "127.0.0.1"
    with socket.socket(getattr(socket, family)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind((host, 0))
        listener.listen()
        command = [sys.executable, "-c", SENDER, family, str(listener.getsockname()[1]), str(nbytes), holder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        mine = listener.accept()[0]
    try:
        sent = int(process.stdout.readline())
        mine.sendall(say)
        yield mine, process, sent
    finally:
        mine.close()
        process.kill()
        process.wait()
        process.stdout.close()


def inode(each):
    return os.fstat(each.fileno()).st_ino


def read_some(mine, nbytes):
    got = 0
    while got < nbytes and select.select([mine], [], [], 2)[0]:
        got += len(mine.recv(min(nbytes - got, 65536)))
    return got


def may_land(*sockets):
    return set(connections.may_land(dict.fromkeys(map(inode, sockets))))


def is_quiet(mine):
    """Whether it becomes so: acknowledgements take their time."""
    until = time.monotonic() + 5
    while may_land(mine) and time.monotonic() < until:
        time.sleep(0.01)
    return not may_land(mine)


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
@pytest.mark.parametrize("holder", ["", "forks"])
def test_what_the_sender_of_a_full_connection_still_holds_is_on_its_way_after_its_end(family, holder):
    """Here the connection looks established, because the end comes after the bytes; so it does with a child's copy."""
    with sending(4 << 20, holder, family) as (mine, process, sent):
        process.kill()
        process.wait()
        assert sent > 1 << 20
        assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01"
        left = sent
        for _ in range(20):
            assert may_land(mine)
            left -= read_some(mine, 16384)
        assert read_some(mine, left - 1) == left - 1
        time.sleep(0.1)
        assert may_land(mine), "one byte is there"
        assert read_some(mine, 1) == 1
        assert is_quiet(mine)


def test_a_connection_that_is_never_empty_is_done_with_when_what_it_had_was_read():
    """One that lives and writes on must not hold up what is asked of another, which has ended."""
    with sending(4 << 20) as (mine, _, sent):
        marks = connections.may_land({inode(mine): None})
        assert marks[inode(mine)] >= sent
        read_some(mine, 1 << 20)
        later = connections.may_land(marks)
        assert later == marks
        received = read_some(mine, sent - (1 << 20) - 5)
        assert received == sent - (1 << 20) - 5
        assert connections.may_land(marks) == marks
        assert connections.may_land({inode(mine): sent - 5}) == {}
        assert connections.may_land({inode(mine): sent - 4}) == {inode(mine): sent - 4}


def test_what_came_before_a_reset_can_still_be_read():
    """The kernel's tables have no such connection any more."""
    with sending(1000, say=b"unread") as (mine, process, _):
        time.sleep(0.1)
        process.kill()
        process.wait()
        time.sleep(0.1)
        assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x07"
        assert may_land(mine)
        assert read_some(mine, 1000) == 1000
        assert is_quiet(mine)


def test_a_connection_that_was_closed_here_is_read_by_nobody():
    with sending(4 << 20) as (mine, process, _):
        process.kill()
        process.wait()
        number = inode(mine)
        assert number in own_sockets()
        marks = connections.may_land({number: None})
        assert list(marks) == [number]
        mine.close()
        assert connections.may_land(marks) == {}


def test_a_connection_that_was_not_accepted_yet_is_seen_with_what_came_with_it():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not awaits_acceptance()
        command = [sys.executable, "-c", SENDER, "AF_INET", str(listener.getsockname()[1]), "1000", ""]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            assert awaits_acceptance()
            process.kill()
        time.sleep(0.05)
        assert awaits_acceptance()
        with listener.accept()[0] as mine:
            assert not awaits_acceptance()
            assert may_land(mine)
            assert read_some(mine, 1000) == 1000
            assert is_quiet(mine)
        assert not awaits_acceptance(), "what was closed here is no guest"


def test_a_port_of_ours_may_be_the_other_ends_as_well(monkeypatch):
    """Two connections can have the same address and port at one end, if they differ at the other."""
    with sending(10) as (mine, _, _sent):
        time.sleep(0.1)
        (seen,) = [each for each in connections._connections() if each.inode == inode(mine)]
        alike = seen._replace(inode=1, here=seen.there, there=(b"elsewhere", 443))
        monkeypatch.setattr(connections, "_connections", lambda: iter([seen, alike]))
        assert may_land(mine)


def test_a_connection_between_two_ends_of_this_process_and_listeners_are_nobody_elses():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other = listener.accept()[0]
        one.sendall(b"unread")
        assert inode(listener) not in own_sockets()
        assert may_land(one, other) == set()
        other.close()


def test_an_end_on_this_host_that_the_table_does_not_show_is_not_taken_for_gone(monkeypatch):
    with sending(10) as (mine, _, _sent):
        assert read_some(mine, 10) == 10
        assert is_quiet(mine)
        monkeypatch.setattr(connections, "unacknowledged", dict)
        assert may_land(mine)
        monkeypatch.setattr(connections, "_is_of_this_host", lambda _: False)
        assert not may_land(mine)


def test_addresses_of_this_host_are_known():
    def seen(family, *address):
        return connections.Connection(1, (b"", 1), (b"", 1), (family, address), 1, 0, 0)

    assert connections._is_of_this_host(seen(socket.AF_INET, "127.0.0.1", 5))
    assert connections._is_of_this_host(seen(socket.AF_INET6, "::1", 5, 0, 0))
    assert not connections._is_of_this_host(seen(socket.AF_INET, "203.0.113.9", 5))


def test_what_can_not_be_looked_at_is_not_taken_for_closed(monkeypatch):
    def exhausted(_):
        raise OSError(24, "EMFILE")

    monkeypatch.setattr(os, "dup", exhausted)
    with socket.socket(), pytest.raises(OSError, match="EMFILE"):
        own_sockets()
