"""The bootstrap server as schedulers know it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from kvferry.api.base import BaseKVBootstrapServer
from kvferry.bootstrap import DEFAULT_PORT, DEFAULT_TTL_S, ForeignRoute


class KVBootstrapServer(BaseKVBootstrapServer):
    """The registry of prefill ranks, served by a thread of this process.

    Attributes:
        port: the real port.
        url: where it is served.
        secret: the bearer token that callers need; None if there is none.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        secret: str | None = None,
        insecure: bool = False,
        ttl_s: float = DEFAULT_TTL_S,
        more: Iterable[ForeignRoute] = (),
    ) -> None:
        """Bind and serve.

        Args:
            host: address to bind to.
            port: port; 0 lets the system choose.
            secret: bearer token that callers need; None takes KVFERRY_SECRET, without it there is none.
            insecure: allow a non-loopback address without a secret.
            ttl_s: seconds without a renewal after which a rank is forgotten.
            more: routes of a serving engine's own registry.

        Raises:
            AddressError: it can't be bound.
            ConfigError: a non-loopback address without secret and without `insecure`.
        """
        from kvferry.bootstrap import BootstrapServer  # the web server: workers do without it

        secret = secret or os.environ.get("KVFERRY_SECRET") or None
        self._server = BootstrapServer(host, port, token=secret, insecure=insecure, ttl_s=ttl_s, more=more)
        self.port = self._server.port
        self.url = self._server.url
        self.secret = secret

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def __enter__(self) -> KVBootstrapServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
