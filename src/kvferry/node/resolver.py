"""What takes time outside of the machine: HTTP to the bootstrap server, name look-ups, reachability.

Small pools of threads, so that one stalled server does not hold up the others, and look-ups hold up no connection;
every call is bounded. Results are handed back through a callback on a pool's thread.
"""

from __future__ import annotations

import socket
import threading
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
        self._look_ups = ThreadPoolExecutor(THREADS, "kvferry-resolver")
        self._connections = ThreadPoolExecutor(THREADS, "kvferry-dialler")

    def run(self, call: Callable[..., Any], done: Callable[[Any], None], *args: Any) -> None:
        """Call `call(*args)` on a thread; `done` gets its result, or the KvferryError that it raised."""
        self._give(self._look_ups, call, done, *args)

    def reach(self, address: str, done: Callable[[Any], None]) -> None:
        """The same for `check_reachable`."""
        self._give(self._connections, check_reachable, done, address)

    @staticmethod
    def _give(pool: ThreadPoolExecutor, call: Callable[..., Any], done: Callable[[Any], None], *args: Any) -> None:
        is_said = threading.Lock()  # taken by whoever says it: what was refused may be done all the same, later

        def say(result: Any) -> None:
            if is_said.acquire(blocking=False):
                done(result)

        def task() -> None:
            try:
                result = call(*args)
            except KvferryError as error:
                result = error
            except Exception as error:  # noqa: BLE001 - who waits for `done` must hear of it, whatever it was
                result = KvferryError(f"a look-up failed: {error!r}")
            say(result)

        try:
            pool.submit(task)
        except RuntimeError as error:  # no thread is to be had, or the interpreter is ending
            say(KvferryError(f"nothing can be looked up: {error}", hint="allow more threads (ulimit -u)"))

    def close(self) -> None:
        """Drop what has not begun, wait for what runs (each is bounded)."""
        for pool in (self._look_ups, self._connections):
            pool.shutdown(wait=True, cancel_futures=True)


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
    if not isinstance(address, str):
        raise AddressError(f"peer address {address!r} is no text", hint='e.g. "10.0.0.1:5000"')
    text = address.removeprefix("tcp://")
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise AddressError(f"peer address {address!r} is not host:port", hint='e.g. "10.0.0.1:5000" or "[::1]:5000"')
    return host, int(port)
