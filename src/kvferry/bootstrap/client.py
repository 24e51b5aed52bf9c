"""Asking a bootstrap server: one fresh connection per call, one deadline per call, one kind of error.

A fresh connection always reaches the server that is there now; a kept one may go on talking to a server that
was replaced behind the same address.
"""

from __future__ import annotations

import http.client
import math
import socket
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvferry.bootstrap.address import join_address, parse_address
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
    Topology,
    Unregistered,
    check_token,
)
from kvferry.errors import BootstrapError, ConfigError
from kvferry.ids import Incarnation, Rank

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

T = TypeVar("T")

_MAX_ANSWER_BYTES = 64 << 20
_FOREIGN = "is it a kvferry bootstrap server of this version that listens there?"
_UNREACHABLE = "is the bootstrap server running, and are host and port those that it prints at its start?"


class BootstrapClient:
    """Calls to one bootstrap server. Holds no connection, so threads may share it.

    Every method raises BootstrapError, naming server, request and cause, where no good answer came within
    timeout_s; the subclasses RefusedError and ConflictError where the server said no.

    Args:
        address: any form that `parse_address` takes.
        token: bearer token to send; None for none.
        timeout_s: the most that one call takes, from connect to the last byte; resolving a name comes on top.

    Raises:
        AddressError: the address is malformed.
        ConfigError: the token or the time-out is malformed.
    """

    def __init__(self, address: str, token: str | None = None, timeout_s: float = 3.0) -> None:
        check_token(token)
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ConfigError(f"bootstrap client: timeout_s is {timeout_s}", hint="give a number above 0")
        self.host, self.port = parse_address(address)
        self.timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    @property
    def url(self) -> str:
        """The server's address, with scheme."""
        return f"http://{join_address(self.host, self.port)}"

    def register(self, entry: RankEntry) -> Registered:
        """Register a prefill rank, or renew it. Raises ConflictError where another one holds it."""
        return self._call("PUT", "/register", Registered, entry)

    def unregister(self, rank: Rank, incarnation: Incarnation) -> Unregistered:
        """Remove a prefill rank, if this incarnation holds it."""
        return self._call("DELETE", "/register", Unregistered, Holder(rank, incarnation))

    def topology(self, dp: int | None = None) -> Topology:
        """Look up the prefill grid, or one DP rank of it."""
        return self._call("GET", "/topology" if dp is None else f"/topology?dp={dp}", Topology)

    def put_rooms(self, rooms: Mapping[int, int]) -> Stored:
        """Say which DP rank has each room."""
        return self._call("POST", "/rooms", Stored, RoomMap(dict(rooms)))

    def query_rooms(self, rooms: Iterable[int]) -> dict[int, int]:
        """Look up the DP rank of rooms; unknown ones are absent from the answer."""
        return self._call("POST", "/rooms/query", Found, RoomList(tuple(rooms))).rooms

    def health(self) -> Health:
        """Whether the server process answers."""
        return self._call("GET", "/health", Health)

    def ready(self) -> Readiness:
        """Whether every prefill rank is registered; "not yet" is an answer, not an error."""
        return self._call("GET", "/ready", Readiness, good=(200, 503))

    def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: msgspec.Struct | None = None,
        good: tuple[int, ...] = (200,),
    ) -> T:
        asked = f"bootstrap server {self.url}: {method} {path}"
        sent = None if body is None else msgspec.json.encode(body)
        status, answer = self._exchange(asked, method, path, sent)
        if status not in good:
            raise _failure(asked, status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise BootstrapError(
                f"{asked} answered {status}, but not as expected: {error}; {_excerpt(answer)}", hint=_FOREIGN
            ) from error

    def _exchange(self, asked: str, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = _Connection(self.host, self.port, time.monotonic() + self.timeout_s)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            with response:
                answer = response.read(_MAX_ANSWER_BYTES)
                if response.length:
                    raise http.client.IncompleteRead(answer, response.length)
                return response.status, answer
        except TimeoutError as error:
            raise BootstrapError(
                f"{asked} got no complete answer within {self.timeout_s} s", hint=_UNREACHABLE
            ) from error
        except (OSError, UnicodeError) as error:
            raise BootstrapError(f"{asked} failed: {_words(error)}", hint=_UNREACHABLE) from error
        except http.client.HTTPException as error:
            raise BootstrapError(f"{asked} got no valid HTTP answer: {error!r}", hint=_FOREIGN) from error
        finally:
            connection.close()


class _DeadlineSocket(socket.socket):
    """A socket whose operations all end by one deadline: a peer that drips bytes can't stretch a call."""

    deadline_s = math.inf

    def arm(self) -> None:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left_s)

    def sendall(self, data: ReadableBuffer, flags: int = 0, /) -> None:
        self.arm()
        super().sendall(data, flags)

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        self.arm()
        return super().recv_into(buffer, nbytes, flags)


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, port: int, deadline_s: float) -> None:
        super().__init__(host, port)
        self._deadline_s = deadline_s

    def connect(self) -> None:
        """Connect to the first of the host's addresses that takes the connection."""
        failure: OSError | None = None
        for family, kind, proto, _, address in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            sock = _DeadlineSocket(family, kind, proto)
            sock.deadline_s = self._deadline_s
            try:
                sock.arm()
                sock.connect(address)
            except OSError as error:
                sock.close()
                failure = failure or error
            else:
                self.sock = sock
                return
        raise failure or OSError(f"{self.host!r} has no address")


def _failure(asked: str, status: int, answer: bytes) -> BootstrapError:
    try:
        said = msgspec.json.decode(answer, type=Failure)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return BootstrapError(f"{asked} answered {status}: {_excerpt(answer)}", hint=_FOREIGN)
    text = f"{asked} answered {status} {said.code}: {said.error}"
    if said.code == "conflict":
        return ConflictError(text, hint=said.hint, expires_s=said.expires_s)
    return RefusedError(text, code=said.code, hint=said.hint)


def _excerpt(answer: bytes) -> str:
    return f"body {answer[:120].decode('utf-8', 'replace')!r}" if answer else "no body"


def _words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]
