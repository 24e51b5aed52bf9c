"""The registry over HTTP: JSON bodies, strict types, and an error text for whatever else comes in.

    PUT    /register      RankEntry           -> Registered
    DELETE /register      Holder              -> Unregistered
    GET    /topology?dp=                      -> Topology
    POST   /rooms         RoomMap             -> Stored
    POST   /rooms/query   RoomList            -> Found
    GET    /ready                             -> Readiness (503 while ranks are missing)
    GET    /health                            -> Health (needs no token)
    GET    /metrics                           -> Prometheus text

Every error is a `Failure`. With a token, every route but /health wants "Authorization: Bearer <token>".
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.bootstrap.records import (
    ConflictError,
    Failure,
    Found,
    Health,
    Holder,
    RankEntry,
    Readiness,
    RefusedError,
    Registered,
    RoomList,
    RoomMap,
    Stored,
    Unregistered,
    check_token,
)
from kvferry.bootstrap.registry import ForeignRoute, Registry

MAX_BODY_BYTES = 1 << 20

_STATUS = {
    "unauthorised": 401,
    "slow": 408,
    "conflict": 409,
    "sizes_differ": 409,
    "stale_epoch": 409,
    "too_large": 413,
    "rooms_full": 507,
}
"""Statuses of refusals; 400 for all others."""

T = TypeVar("T")
Handler = Callable[[Request, bytes], Response]


class _Axes(msgspec.Struct):
    dp: int
    pp: int
    cp: int
    tp: int


class _Keys(msgspec.Struct):
    """The axes that a body must spell out: a forgotten one must not quietly mean rank 0."""

    rank: _Axes
    sizes: _Axes | None = None


class Metrics:
    """The server's own Prometheus registry, so that nothing of the embedding process shows up in it."""

    def __init__(self, instance: str) -> None:
        self.registry = own = CollectorRegistry()
        prefix = "kvferry_bootstrap"
        self.ranks = Gauge(f"{prefix}_ranks", "Prefill ranks that are registered.", registry=own)
        self.expected = Gauge(f"{prefix}_ranks_expected", "Ranks of the prefill grid; 0 while unknown.", registry=own)
        self.registrations = Counter(f"{prefix}_registrations", "Registrations by outcome.", ["outcome"], registry=own)
        self.lookups = Counter(f"{prefix}_lookups", "Topologies handed out.", registry=own)
        self.rooms = Counter(
            f"{prefix}_room_queries",
            "Rooms that were asked for, by result.",
            ["result"],
            registry=self.registry,
        )
        self.expired = Counter(f"{prefix}_expired", "Entries that were not renewed.", registry=own)
        info = Gauge(f"{prefix}_info", "1, labelled by server instance.", ["instance"], registry=own)
        info.labels(instance).set(1)


class BootstrapApp:
    """The routes around one registry. All of it runs on the server's one event loop.

    Args:
        registry: the registry; its `instance` is what every answer says.
        token: bearer token that every route but /health wants; None for none.
        clock: the time in seconds, monotonic.
        max_body_bytes: longer bodies are refused.
        body_timeout_s: bodies that take longer to arrive are refused.
        more: routes of a serving engine's own registry, for what asks there by its own names.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        token: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_timeout_s: float = 5.0,
        more: Iterable[ForeignRoute] = (),
    ) -> None:
        check_token(token)
        self._more = tuple(more)
        self.registry = registry
        self.metrics = Metrics(registry.instance)
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    def starlette(self) -> Starlette:
        """Build the ASGI application."""
        routes = [
            self._route("/register", "PUT", self._register),
            self._route("/register", "DELETE", self._unregister),
            self._route("/topology", "GET", self._topology),
            self._route("/rooms", "POST", self._put_rooms),
            self._route("/rooms/query", "POST", self._query_rooms),
            self._route("/ready", "GET", self._ready),
            self._route("/metrics", "GET", self._metrics),
            self._route("/health", "GET", self._health, needs_token=False),
            *(
                self._route(each.path, each.method, partial(self._foreign, each), needs_token=each.needs_token)
                for each in self._more
            ),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._http_error})
        app.router.redirect_slashes = False  # a redirect would be an answer without an instance
        return app

    def _route(self, path: str, method: str, handler: Handler, *, needs_token: bool = True) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                if needs_token:
                    self._authorise(request)
                body = b"" if method == "GET" else await self._read_body(request)
                self.metrics.expired.inc(self.registry.expire(self._clock()))
                return handler(request, body)
            except RefusedError as refused:
                return self._refuse(refused)

        return Route(path, endpoint, methods=[method])

    def _register(self, _request: Request, body: bytes) -> Response:
        try:
            _decode(body, _Keys)
            entry = _decode(body, RankEntry)
            outcome = self.registry.register(entry, self._clock())
        except RefusedError as refused:
            self.metrics.registrations.labels(refused.code).inc()
            raise
        self.metrics.registrations.labels(outcome).inc()
        registry = self.registry
        return _answer(Registered(outcome, registry.ttl_s, registry.generation, registry.instance))

    def _unregister(self, _request: Request, body: bytes) -> Response:
        _decode(body, _Keys)
        holder = _decode(body, Holder)
        removed = self.registry.unregister(holder.rank, holder.incarnation, self._clock())
        return _answer(Unregistered(removed, self.registry.generation, self.registry.instance))

    def _topology(self, request: Request, _body: bytes) -> Response:
        topology = self.registry.topology(_parse_dp(request.query_params.get("dp")), self._clock())
        self.metrics.lookups.inc()
        return _answer(topology)

    def _put_rooms(self, _request: Request, body: bytes) -> Response:
        rooms = _decode(body, RoomMap).rooms
        self.registry.put_rooms(rooms, self._clock())
        return _answer(Stored(len(rooms), self.registry.instance))

    def _query_rooms(self, _request: Request, body: bytes) -> Response:
        asked = set(_decode(body, RoomList).rooms)
        found = self.registry.query_rooms(asked, self._clock())
        self.metrics.rooms.labels("found").inc(len(found))
        self.metrics.rooms.labels("unknown").inc(len(asked) - len(found))
        return _answer(Found(found, self.registry.instance))

    def _ready(self, _request: Request, _body: bytes) -> Response:
        now = self._clock()
        ready, missing = self.registry.ready(now)
        registered, expected = self.registry.counts(now)
        generation, instance = self.registry.generation, self.registry.instance
        readiness = Readiness(ready, registered, expected, missing, generation, instance)
        return _answer(readiness, 200 if ready else 503)

    def _metrics(self, _request: Request, _body: bytes) -> Response:
        registered, expected = self.registry.counts(self._clock())
        self.metrics.ranks.set(registered)
        self.metrics.expected.set(expected)
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _foreign(self, route: ForeignRoute, request: Request, body: bytes) -> Response:
        status, answer = route.answer(self.registry, dict(request.query_params), body, self._clock())
        return Response(msgspec.json.encode(answer), status, media_type="application/json")

    def _health(self, _request: Request, _body: bytes) -> Response:
        return _answer(Health("ok", self.registry.instance))

    def _authorise(self, request: Request) -> None:
        if self._authorization is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._authorization):
            raise RefusedError(
                f"{request.method} {request.url.path} needs the bearer token; the request has "
                f"{'another one' if given else 'none'}",
                code="unauthorised",
                hint="give prefill, decode and bootstrap the same secret",
            )

    async def _read_body(self, request: Request) -> bytes:
        try:
            return await asyncio.wait_for(self._collect(request), self._body_timeout_s)
        except asyncio.TimeoutError:
            raise RefusedError(
                f"the body did not arrive within {self._body_timeout_s} s",
                code="slow",
                hint="send it at once",
            ) from None
        except ClientDisconnect:  # nobody reads the answer
            raise RefusedError("the client went away before the body was complete", code="bad_request") from None

    async def _collect(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body_bytes:
                raise RefusedError(
                    f"the body is longer than {self._max_body_bytes} bytes",
                    code="too_large",
                    hint="send rooms in smaller batches",
                )
        return bytes(body)

    def _refuse(self, refused: RefusedError) -> Response:
        expires_s = refused.expires_s if isinstance(refused, ConflictError) else 0.0
        failure = Failure(refused.message, refused.code, self.registry.instance, refused.hint, expires_s)
        headers = {"www-authenticate": "Bearer"} if refused.code == "unauthorised" else None
        return _answer(failure, _STATUS.get(refused.code, 400), headers)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        """Starlette's own refusals: no such path, or not with that method."""
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "bad_method"}.get(error.status_code, "bad_request")
        text = f"{request.method} {request.url.path[:200]}: {error.detail}"
        failure = Failure(text, code, self.registry.instance, "this is a kvferry bootstrap server")
        return _answer(failure, error.status_code, dict(error.headers or {}))


def new_instance() -> str:
    """Make an instance id: random, so that a restarted or foreign server is told from the one before."""
    return secrets.token_hex(8)


def _answer(record: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(record), status, headers, media_type="application/json")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind, strict=True)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RefusedError(
            f"the body ({len(body)} bytes) is not what is expected: {str(error)[:200]}",
            code="bad_request",
            hint="send JSON with the documented fields and types",
        ) from None


def _parse_dp(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise RefusedError(f"dp={text[:40]!r} is not a DP rank", code="bad_request", hint="leave dp out to ask for all")
    return int(text)
