"""What the engine does for peers that write here: the library is driven, they are heard, fences land."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

from kvferry.engines.devices import rdma_devices
from kvferry.engines.host import this_process
from kvferry.engines.nixl.agent import Agent
from kvferry.engines.nixl.connections import unacknowledged
from kvferry.engines.nixl.options import Options
from kvferry.engines.nixl.writers import Writers
from kvferry.engines.seam import Done, Outcome, Ticket
from kvferry.ids import PeerId

log = logging.getLogger("kvferry.engines")


def why_no_fence(options: Options, *, has_device_memory: bool) -> str:
    """Say why the end of a writer's process proves nothing here, whatever is seen afterwards; "" if it may prove it."""
    if options.backend != "UCX":
        return f"nothing is known of what the backend {options.backend!r} leaves on the way"
    if options.parameters.get("ucx_error_handling_mode", "peer") != "peer":
        # with "peer" UCX refuses its own shared memory, which nobody can look into from outside
        return "without UCX's error handling peers may write by its shared memory, where rows outlast their writer"
    if has_device_memory:
        return "writes to device memory outlast their writer as long as nobody has shown the contrary"
    if rdma_devices():
        return "this host has RDMA devices, and what is in one can't be seen"
    return _why_blind()


def _why_blind() -> str:
    try:
        unacknowledged()
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, ValueError, AttributeError) as error:
        return f"the system does not say what is on its way: {error}"
    return "" if this_process() is not None else "the system does not say which process this is"


class Serving:
    """The target's half of the engine.

    Attributes:
        why_no_fence: why no fence can land here, or "".
        answers: where writers that say hello read the answer; 0 where none is expected to.
    """

    def __init__(self, agent: Agent, options: Options, nonce: bytes) -> None:
        self.why_no_fence = why_no_fence(options, has_device_memory=agent.has_device_memory)
        self.answers = 0 if self.why_no_fence else agent.answers
        self._agent = agent
        self._writers = Writers(agent, nonce)
        self._troubles = 0
        self._last_trouble = ""

    def step(self, now: float) -> Iterator[Done]:
        """Drive the library; gives the fences that have landed."""
        try:
            messages = self._agent.progress()
        except Exception as error:  # noqa: BLE001 - it concerns a peer that writes here, whose own tickets say so
            self._trouble(error)
            return
        if not self.why_no_fence:
            self._writers.hear(messages)
            yield from self._writers.news(now)

    def fence(self, ticket: Ticket, peer: PeerId, claim: int | None) -> Iterator[Done]:
        """Begin a fence, or end it at once where there is no proof."""
        if self.why_no_fence:
            yield Done(ticket, Outcome.FAILED_QUIET, self.why_no_fence, "no fence")
        else:
            self._writers.fence(ticket, peer, claim)

    def info(self) -> dict[str, object]:
        """Who may write here, what fences wait for, and troubles that concern no single ticket; for people."""
        return {
            "no_fence": self.why_no_fence,
            "writers": len(self._writers),
            "fences_waiting": self._writers.why_waiting(),
            "troubles": self._troubles,
            "last_trouble": self._last_trouble,
        }

    def _trouble(self, error: Exception) -> None:
        self._troubles += 1
        self._last_trouble = f"{type(error).__name__}: {error}"
        if self._troubles & (self._troubles - 1) == 0:
            log.warning("NIXL raised %d times while it served peers, at last %s", self._troubles, self._last_trouble)
