"""A plain TCP stream over loopback, for comparison: one connection, 1 MiB calls, a hot buffer at the receiver."""

from __future__ import annotations

import contextlib
import socket

from kvferry.bench.failure import BenchError

CHUNK_BYTES = 1 << 20
LIMIT_S = 60.0


class StreamEnd:
    """One end of the connection; every call is bounded."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._buffer = bytearray(CHUNK_BYTES)

    def listen(self) -> int:
        """Listen on a port of loopback; returns it."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LIMIT_S)
        return int(self._listener.getsockname()[1])

    def connect(self, port: int) -> None:
        """Connect to the other end."""
        self._socket = socket.create_connection(("127.0.0.1", port), LIMIT_S)

    def send(self, data: memoryview) -> None:
        """Send all of it, 1 MiB per call."""
        assert self._socket is not None
        for begin in range(0, len(data), CHUNK_BYTES):
            self._socket.sendall(data[begin : begin + CHUNK_BYTES])

    def receive(self, nbytes: int) -> None:
        """Receive as many bytes. Raises BenchError if the connection ends before."""
        if self._socket is None:
            assert self._listener is not None
            self._socket, _ = self._listener.accept()
            self._socket.settimeout(LIMIT_S)
        view = memoryview(self._buffer)
        left = nbytes
        while left:
            got = self._socket.recv_into(view[: min(left, CHUNK_BYTES)])
            if not got:
                raise BenchError(f"the plain stream ended {left} of {nbytes} bytes early")
            left -= got

    def close(self) -> None:
        """Close what is open."""
        for each in (self._listener, self._socket):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.close()
