"""Who is there: a Unix socket that the engine listens on, for XGMI, whose library never asks the other process.

It has no thread: a connection succeeds as soon as it is asked for, and the kernel says whose socket it is. Nothing is
said over it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct

from kvferry.engines.host import Process, has_ended

_BACKLOG = 4096
_CREDENTIALS = struct.Struct("3i")


class Door:
    """A listening socket without a file.

    Attributes:
        name: how peers find it.
    """

    def __init__(self) -> None:
        self.name = f"kvferry-mori-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(_BACKLOG)

    def welcome(self) -> None:
        """Let go of those who have knocked."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def why_nobody(name: str, process: Process) -> str:
    """Why there is no engine of this process behind a door, or ""."""
    if has_ended(process):
        return f"its process {process.pid} has ended"
    with socket.socket(socket.AF_UNIX) as knock:
        knock.setblocking(False)
        try:
            knock.connect(f"\0{name}")
        except BlockingIOError:
            return ""  # so many have knocked that it does not keep up: somebody listens
        except (OSError, ValueError) as error:
            return f"its engine is closed: {error}"
        pid = _CREDENTIALS.unpack(knock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    return "" if pid == process.pid else f"its engine is process {pid}, not {process.pid} as it says"
