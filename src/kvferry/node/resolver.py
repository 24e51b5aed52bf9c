"""What takes time outside of the machine: HTTP to the bootstrap server, name look-ups, reachability.

A small pool of threads, so that one stalled server does not hold up the others; every call is bounded. Results are
handed back through a callback on the pool's thread.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvferry.errors import AddressError, KvferryError
from kvferry.node.hosts import tcp_endpoint

THREADS = 32
"""Each may wait for a server that does not answer; they are started when they are needed."""
CONNECT_TIMEOUT_S = 2.0


class Resolver:
    """Runs bounded look-ups off the control thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "kvferry-resolver")

    def run(self, call: Callable[..., Any], done: Callable[[Any], None], *args: Any) -> None:
        """Call `call(*args)` on a thread; `done` gets its result, or the KvferryError that it raised."""

        def task() -> None:
            try:
                result = call(*args)
            except KvferryError as error:
                result = error
            except Exception as error:  # noqa: BLE001 - who waits for `done` must hear of it, whatever it was
                result = KvferryError(f"a look-up failed: {error!r}")
            done(result)

        self._pool.submit(task)

    def close(self) -> None:
        """Drop what has not begun, wait for what runs (each is bounded)."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def check_reachable(address: str) -> str:
    """Connect to "tcp://host:port" and hang up: libzmq would retry in silence where this says why.

    Returns:
        The address that answered, numeric, so that a name is looked up once and all its addresses are tried.

    Raises:
        AddressError: malformed, unknown host, refused, no route, timed out.
    """
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S) as connection:
            numeric = socket.getnameinfo(connection.getpeername(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    except (OSError, UnicodeError) as error:
        raise AddressError(
            f"prefill worker at {host}:{port} can't be reached: {getattr(error, 'strerror', None) or error}",
            hint="check that it runs, its advertised address and port range, and firewalls",
        ) from None
    return tcp_endpoint(numeric[0], port)


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of "tcp://host:port", "host:port" or "[v6]:port".

    Raises:
        AddressError: it is none of these.
    """
    text = address.removeprefix("tcp://")
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise AddressError(f"peer address {address!r} is not host:port", hint='e.g. "10.0.0.1:5000" or "[::1]:5000"')
    return host, int(port)
