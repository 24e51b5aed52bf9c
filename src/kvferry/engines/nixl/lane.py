"""An agent that copies beside the engine's own: nobody writes to it, and it connects to whom the engine knows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from functools import partial

import msgspec

from kvferry.engines.nixl.agent import Agent
from kvferry.engines.nixl.farewell import Attachment
from kvferry.engines.nixl.memory import Rows
from kvferry.engines.nixl.native import explain
from kvferry.engines.nixl.peers import Peers
from kvferry.engines.nixl.probe import Probe
from kvferry.engines.nixl.transfer import Transfer
from kvferry.engines.seam import Region

log = logging.getLogger("kvferry.engines")

PROGRESS_EVERY_S = 0.1
"""How often an idle agent hears what becomes of its connections."""


class Lane:
    """All methods but `write` are called by the engine's thread.

    Attributes:
        problem: why it is of no use, or "".
    """

    def __init__(self, making: Future[Agent], timeout_s: float) -> None:
        """Prepare it.

        Args:
            making: the agent, once it is made.
            timeout_s: after how many seconds a peer that can't be connected to is given up.
        """
        self.problem = ""
        self._making = making
        self._timeout_s = timeout_s
        self._agent: Agent | None = None
        self._peers: Peers | None = None
        self._regions: Sequence[Region] = ()
        self._waiting: list[Attachment] = []
        self._probes: dict[Attachment, Probe] = {}
        self._reached: set[Attachment] = set()
        self._progress_at = 0.0

    def reaches(self, attachment: Attachment) -> bool:
        """Whether it can write there."""
        return attachment in self._reached and not self.problem

    def register(self, regions: Sequence[Region]) -> None:
        """Replace the memory that is read, while nothing is copied."""
        self._regions = regions
        if self._agent is not None and not self.problem:
            self._guarded(partial(self._agent.replace_memory, regions))

    def connect(self, attachment: Attachment) -> None:
        """Connect to a peer that the engine has attached, unless it is connected, or about to be."""
        if attachment not in self._reached and attachment not in self._probes and attachment not in self._waiting:
            self._waiting.append(attachment)

    def leave(self, attachment: Attachment) -> None:
        """Begin nothing more there."""
        self._reached.discard(attachment)
        if attachment in self._waiting:
            self._waiting.remove(attachment)
        if attachment in self._probes:
            self._probes[attachment].give_up("left")

    def step(self, in_use: Callable[[], Set[str]], now: float) -> None:
        """Go on connecting, and hear what becomes of connections; see Lanes.step."""
        if self._agent is None:
            self._start()
        if self._agent is None:
            return
        if self._waiting and not self.problem:
            used = in_use() | {probe.name for probe in self._probes.values()}
            # who finds no place waits for one
            self._waiting = [each for each in self._waiting if not self._begin(self._agent, each, used, now)]
        for attachment, probe in list(self._probes.items()):
            self._advance(self._agent, attachment, probe, now)
        if now - self._progress_at >= PROGRESS_EVERY_S:
            self._progress_at = now
            try:
                self._agent.progress()
            except Exception as error:  # noqa: BLE001 - it concerns connections that transfers will say more of
                log.debug("NIXL raised while an agent that copies was idle: %r", error)

    def doubt(self, name: str) -> None:
        """A transfer to a peer's agent has failed: it is connected anew when it is needed again."""
        if self._peers is not None:
            self._peers.doubt(name)

    def forget_unused(self, wanted: Set[str]) -> None:
        """Forget agents of peers as the engine does."""
        if self._peers is not None:
            self._peers.forget_unused(wanted | {probe.name for probe in self._probes.values()})

    def write(self, peer: str, here: Rows, there: Rows) -> Transfer:
        """Make a transfer; raises what the library raises. By one thread at a time."""
        assert self._agent is not None
        return self._agent.write(peer, here, there)

    def forget_all(self) -> None:
        """Disconnect from all, before what is left of transfers is freed."""
        self._start()
        if self._peers is not None:
            self._peers.forget_all()

    def close(self) -> None:
        """End the agent, after `forget_all`."""
        if self._agent is not None:
            for probe in self._probes.values():
                probe.drop(self._agent)
            self._agent.close()

    # -- helpers

    def _start(self) -> None:
        """Look whether the agent is made."""
        if self._making.done() and not self._making.cancelled() and not self.problem:
            self._guarded(self._take_agent)

    def _take_agent(self) -> None:
        self._agent = self._making.result()
        self._peers = Peers(self._agent)
        self._agent.replace_memory(self._regions)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever it raises: the engine's own agent does it all
            self.problem = explain(error).cause
            log.warning("NIXL copies with one thread: %s", self.problem)

    def _begin(self, agent: Agent, attachment: Attachment, in_use: Set[str], now: float) -> bool:
        slot, peers = agent.take_slot(), self._peers
        if slot is None or peers is None:
            return False
        # the attachment as a whole was asked for, and let in
        said = msgspec.structs.replace(attachment.said, answers=0)
        probe = Probe(attachment.peer, 0, said, slot, now + self._timeout_s, self._timeout_s, 0, None)
        self._probes[attachment] = probe
        try:
            peers.load(said, in_use)
        except Exception as error:  # noqa: BLE001 - whatever it raises: this peer is written to without it
            probe.give_up(explain(error).cause)
        else:
            probe.begin(agent)
        return True

    def _advance(self, agent: Agent, attachment: Attachment, probe: Probe, now: float) -> None:
        probe.step(agent, now)
        if probe.failed:
            self.doubt(probe.name)
        if probe.over:
            probe.drop(agent)
            del self._probes[attachment]
            if probe.has_landed:
                self._reached.add(attachment)
