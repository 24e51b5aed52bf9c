"""Keeps a prefill rank's entry at the bootstrap server alive."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from kvferry.bootstrap import (
    DEFAULT_TTL_S,
    RENEWALS_PER_TTL,
    BootstrapClient,
    ConflictError,
    RankEntry,
    RefusedError,
)
from kvferry.errors import BootstrapError
from kvferry.ids import Rank
from kvferry.layout import digest
from kvferry.node.node import Node

log = logging.getLogger("kvferry.bootstrap")

CONFLICT_POLL_S = 0.2
CONFLICT_MARGIN_S = 0.5


class Registrar:
    """Registers at once, then renews on a thread of its own until closed.

    Attributes:
        state: "registered", or why not, for info().
    """

    def __init__(
        self, address: str, node: Node, sizes: Rank, secret: str | None, extra: Mapping[str, str] | None = None
    ) -> None:
        """Register; waits for the first answer, and for the entry of a killed predecessor to expire.

        `extra` is what decode ranks may read of this rank there.

        Raises:
            ConflictError: another incarnation holds the rank, and is alive: its entry was renewed.
            RefusedError: the server refuses this rank; one that can't be reached is tried again on the thread.
        """
        self._client = BootstrapClient(address, token=secret)
        self._node = node
        self._sizes = sizes
        self._extra = dict(extra or {})
        self._stop = threading.Event()
        self._ttl_s = DEFAULT_TTL_S
        self.state = "not registered yet"
        try:
            self._register_after_predecessor()
        except RefusedError:
            raise
        except BootstrapError as error:
            self._note(error)
        self._thread = threading.Thread(target=self._renew, name="kvferry-registrar", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop renewing and take the entry back; waits for a call that runs."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(10.0)
        try:
            self._client.unregister(self._node.layout.rank, self._node.incarnation)
        except BootstrapError as error:
            log.info("the entry was not taken back, it will expire: %s", error)

    def _register_after_predecessor(self) -> None:
        """A process that was killed leaves an entry behind, which ends when it is not renewed."""
        give_up_s = None
        while True:
            try:
                return self._register()
            except ConflictError as error:
                now = time.monotonic()
                if give_up_s is None:
                    give_up_s = now + error.expires_s + CONFLICT_MARGIN_S
                if now >= give_up_s:
                    raise
                self._note(error)
            time.sleep(CONFLICT_POLL_S)

    def _renew(self) -> None:
        while not self._stop.wait(self._ttl_s / RENEWALS_PER_TTL):
            try:
                self._register()
            except BootstrapError as error:
                self._note(error)

    def _register(self) -> None:
        node = self._node
        answer = self._client.register(RankEntry(
            rank=node.layout.rank, sizes=self._sizes, endpoint=node.endpoint, layout_digest=digest(node.layout),
            incarnation=node.incarnation, epoch=node.epoch, extra=self._extra,
        ))  # fmt: skip
        self._ttl_s = answer.ttl_s
        self.state = "registered"

    def _note(self, error: BootstrapError) -> None:
        if not self.state.startswith(error.message):  # its hint may differ, in seconds
            log.warning("%s", error)
        self.state = str(error)
