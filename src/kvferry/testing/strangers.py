"""Strangers: whoever connects to a TCP port of a process and says something that is no protocol, or nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

Address = tuple[str, int]

GARBAGE = (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, bytes(300), os.urandom(4096), os.urandom(1 << 20))

_TABLES = ((socket.AF_INET, "/proc/net/tcp"), (socket.AF_INET6, "/proc/net/tcp6"))
_LISTENS = "0A"
_PATIENCE_S = 0.2


def listeners(pid: int) -> list[Address]:
    """Where a process of this host listens by TCP, as one connects to it: what listens everywhere by loopback."""
    owned = _sockets_of(pid)
    found = []
    for family, table in _TABLES:
        for line in _lines(table):
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in owned:
                found.append(_address(family, fields[1]))
    return found


def shout(addresses: Sequence[Address]) -> int:
    """Say all kinds of garbage, each on a connection of its own; returns how many connections were made."""
    made = 0
    for address in addresses:
        for data in GARBAGE:
            with contextlib.suppress(OSError), socket.create_connection(address, _PATIENCE_S) as stranger:
                made += 1
                stranger.sendall(data)
                stranger.recv(100)  # an answer, the end, or silence
    return made


def _sockets_of(pid: int) -> set[str]:
    folder = Path(f"/proc/{pid}/fd")
    found = set()
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(entry))
    return found


def _lines(table: str) -> list[str]:
    try:
        return Path(table).read_text().splitlines()[1:]
    except FileNotFoundError:  # a system without IPv6
        return []


def _address(family: socket.AddressFamily, text: str) -> Address:
    """From what the kernel writes: the address in words of the processor's order, and the port, in hexadecimal."""
    host, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    if not any(raw):
        return ("127.0.0.1" if family is socket.AF_INET else "::1"), int(port, 16)
    return socket.inet_ntop(family, raw), int(port, 16)
