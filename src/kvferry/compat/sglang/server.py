"""The registry of prefill ranks, started by SGLang's tokenizer process."""

from __future__ import annotations

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer

from kvferry.api import KVBootstrapServer
from kvferry.compat.sglang.routes import ROUTES


class KVFerryBootstrapServer(BaseKVBootstrapServer):
    """kvferry's bootstrap server at SGLang's host and port.

    Attributes:
        inner: kvferry's own.
    """

    def __init__(self, host: str, port: int) -> None:
        """Bind and serve.

        Raises:
            AddressError: it can't be bound.
            ConfigError: another host than loopback without KVFERRY_SECRET.
        """
        self.inner = KVBootstrapServer(host, port, more=ROUTES)

    def close(self) -> None:
        """Stop serving."""
        self.inner.close()
