"""Keeps a prefill rank's entry at the bootstrap server alive."""

from __future__ import annotations

import logging
import threading

from kvferry.bootstrap import BootstrapClient, RankEntry, RefusedError
from kvferry.errors import BootstrapError
from kvferry.ids import Rank
from kvferry.layout import digest
from kvferry.node.node import Node

log = logging.getLogger("kvferry.bootstrap")


class Registrar:
    """Registers at once, then renews on a thread of its own until closed.

    Attributes:
        state: "registered", or why not, for info().
    """

    def __init__(self, address: str, node: Node, sizes: Rank, secret: str | None) -> None:
        """Register; waits for the first answer.

        Raises:
            RefusedError: the server refuses this rank; one that can't be reached is tried again on the thread.
        """
        self._client = BootstrapClient(address, token=secret)
        self._node = node
        self._sizes = sizes
        self._stop = threading.Event()
        self.state = ""
        try:
            self._register()
        except RefusedError:
            raise
        except BootstrapError as error:
            self._note(str(error))
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

    def _renew(self) -> None:
        while not self._stop.wait(self._node.config.register_s):
            try:
                self._register()
            except BootstrapError as error:
                self._note(str(error))

    def _register(self) -> None:
        node = self._node
        self._client.register(RankEntry(
            rank=node.layout.rank, sizes=self._sizes, endpoint=node.endpoint, layout_digest=digest(node.layout),
            incarnation=node.incarnation, epoch=node.epoch,
        ))  # fmt: skip
        self.state = "registered"

    def _note(self, problem: str) -> None:
        if problem != self.state:
            log.warning("%s", problem)
        self.state = problem
