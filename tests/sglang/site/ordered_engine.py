"""The engine of the run, which holds batches, or leaves out an element, when a test orders it to."""

from __future__ import annotations

import os

import msgspec
import orders

from kvferry.engines import find
from kvferry.engines.seam import Batch, Done, Ticket
from kvferry.ids import PeerId
from kvferry.testing.faulty import Faulty

ELEMENT_BYTES = 64
"""One head of one token of the tiny Llama in bfloat16."""


class OrderedEngine(Faulty):
    """Looks for orders whenever it is called."""

    def __init__(self) -> None:
        super().__init__(find.load(os.environ["FERRY_TEST_ENGINE"]))

    def submit(self, peer: PeerId, batch: Batch) -> Ticket:
        """Take a batch, as it should be or not."""
        self._obey()
        if orders.taken("drop_element"):
            batch = _without_first_element(batch)
        ticket = super().submit(peer, batch)
        if orders.given("hold"):
            orders.answer("holding")
        return ticket

    def poll(self, budget_s: float) -> list[Done]:
        """Write what is due, unless it is to be held."""
        self._obey()
        return super().poll(budget_s)

    def _obey(self) -> None:
        if orders.given("hold"):
            self.hold()
        else:
            self.release()


def _without_first_element(batch: Batch) -> Batch:
    src, dst, nbytes = batch.src.copy(), batch.dst.copy(), batch.nbytes.copy()
    src[0] += ELEMENT_BYTES
    dst[0] += ELEMENT_BYTES
    nbytes[0] -= ELEMENT_BYTES
    return msgspec.structs.replace(batch, src=src, dst=dst, nbytes=nbytes, total_bytes=int(nbytes.sum()))
