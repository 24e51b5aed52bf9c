"""The bootstrap server: bound when its constructor returns, served by one daemon thread."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterable
from types import TracebackType

import uvicorn

from kvferry.bootstrap.address import DEFAULT_PORT, join_address
from kvferry.bootstrap.app import BootstrapApp, new_instance
from kvferry.bootstrap.records import DEFAULT_TTL_S, check_token
from kvferry.bootstrap.registry import ForeignRoute, Registry
from kvferry.errors import AddressError, ConfigError

_THREAD_NAME = "kvferry-bootstrap"
_BACKLOG = 1024
_MAX_CONNECTIONS = 512
_MAX_CONNECTION_S = 30.0
_START_LIMIT_S = 10.0
_GRACE_S = 1
_CLOSE_LIMIT_S = 5.0


class BootstrapServer:
    """A bootstrap registry that answers HTTP.

    The port is bound and the server answers when the constructor returns, so a port in use is an error of the
    caller and not of a thread, and port 0 gives the real port at once.

    Args:
        host: address or name to bind; brackets around IPv6 are optional.
        port: port to bind; 0 lets the system choose.
        token: bearer token that clients must send; None for none.
        insecure: allow other hosts to reach it although there is no token.
        ttl_s: seconds without a renewal after which a rank is forgotten.
        room_ttl_s: seconds after which a room's DP rank is forgotten.
        more: routes of a serving engine's own registry.

    Raises:
        AddressError: the address can't be resolved or bound.
        ConfigError: other hosts could write without a token, or the token or a time is malformed.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        token: str | None = None,
        insecure: bool = False,
        ttl_s: float = DEFAULT_TTL_S,
        room_ttl_s: float = 300.0,
        more: Iterable[ForeignRoute] = (),
    ) -> None:
        check_token(token)
        self.instance = new_instance()
        app = BootstrapApp(Registry(ttl_s, room_ttl_s, instance=self.instance), token=token, more=more)
        self._socket = _bind(host.removeprefix("[").removesuffix("]"), port, insecure or token is not None)
        self.host, self.port = self._socket.getsockname()[:2]
        self._server = _Server(_config(app))
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name=f"{_THREAD_NAME}-{self.port}", daemon=True
        )
        self._thread.start()
        if not self._server.serving.wait(_START_LIMIT_S):
            self.close()
            raise AddressError(
                f"bootstrap server at {self.url} did not start within {_START_LIMIT_S} s",
                hint="the log of uvicorn.error has the cause",
            )

    @property
    def url(self) -> str:
        """Where clients on this host reach it; other hosts use this host's own address and `port`."""
        any_address = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared, not bound
        return f"http://{join_address(any_address.get(self.host, self.host), self.port)}"

    def close(self) -> None:
        """Stop, and wait for the end for at most some seconds. May be called twice."""
        self._server.should_exit = True
        self._thread.join(_CLOSE_LIMIT_S)
        self._socket.close()

    def __enter__(self) -> BootstrapServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(uvicorn.Server):
    """uvicorn, which says when it serves and leaves no connection behind."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = threading.Event()
        self._seen_s: dict[asyncio.Transport, float] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for transport in self._transports():
            transport.abort()

    async def on_tick(self, counter: int) -> bool:
        self._end_old_connections(time.monotonic())
        return await super().on_tick(counter)

    def _end_old_connections(self, now_s: float) -> None:
        """End those that outlived any request: uvicorn waits for ever for a peer that says nothing."""
        self._seen_s = {transport: self._seen_s.get(transport, now_s) for transport in self._transports()}
        for transport, seen_s in self._seen_s.items():
            if now_s - seen_s > _MAX_CONNECTION_S:
                transport.abort()

    def _transports(self) -> list[asyncio.Transport]:
        return [connection.transport for connection in self.server_state.connections]


class _Quiet(logging.Filter):
    """Drops what uvicorn says on our threads, except exceptions; another uvicorn in the process goes on."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.threadName or "").startswith(_THREAD_NAME) or bool(record.exc_info)


_QUIET = _Quiet()


def _config(app: BootstrapApp) -> uvicorn.Config:
    # levels and handlers of uvicorn's loggers belong to the whole process: they are left alone
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).addFilter(_QUIET)
    return uvicorn.Config(
        app.starlette(),
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE_S,
    )


def _bind(host: str, port: int, may_be_public: bool) -> socket.socket:
    if not 0 <= port < 65536:
        raise AddressError(f"bootstrap server: port {port} is not within 0 and 65535", hint="0 picks a free one")
    where = join_address(host, port)
    failures: list[OSError] = []
    for family, address in _resolve(host, port):
        if not may_be_public and not ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"bootstrap server: binding {where} ({address[0]}) lets other hosts register without a token",
                hint="set a token (KVFERRY_SECRET), bind 127.0.0.1, or pass insecure=True (--insecure)",
            )
        try:
            return _listen(family, address)
        except OSError as error:
            failures.append(error)
    raise _bind_error(where, failures[0])


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    if not host:
        raise AddressError("bootstrap server: the host is empty", hint="bind 127.0.0.1, or 0.0.0.0 for all")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise AddressError(
            f"bootstrap server: host {host!r} can't be resolved: {error}", hint="give an address of this host"
        ) from error
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]


def _listen(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for TIME_WAIT
        if family == socket.AF_INET6 and address[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(_BACKLOG)  # here: with SO_REUSEADDR two sockets can bind, but only one can listen
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_error(where: str, error: OSError) -> AddressError:
    hints = {
        errno.EADDRINUSE: "end the process that listens there, choose another port, or 0 for a free one",
        errno.EADDRNOTAVAIL: "give an address that this host has",
        errno.EACCES: "ports below 1024 need a privilege; choose a higher one",
    }
    words = "the port is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
    bound = AddressError(
        f"bootstrap server: {where} can't be bound: {words}",
        hint=hints.get(error.errno or 0, "choose another address"),
    )
    bound.__cause__ = error
    return bound
