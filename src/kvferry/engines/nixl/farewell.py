"""The writer's half of leaving: a target is told when an attachment has written its last, so that it need not wait."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass

from kvferry.engines.host import Process
from kvferry.engines.nixl.agent import Agent
from kvferry.engines.nixl.blob import Blob
from kvferry.engines.nixl.greeting import Bye, pack
from kvferry.engines.nixl.memory import Memory
from kvferry.ids import PeerId


@dataclass(eq=False)
class Attachment:
    """A peer that can be written to.

    Attributes:
        peer: who it is.
        said: what it has said.
        memory: what it has registered.
        number: that it knows this attachment by; b"" if it keeps no book.
        is_doubtful: a write has failed: nobody knows when its rows are no longer on their way.
    """

    peer: PeerId
    said: Blob
    memory: Memory
    number: bytes
    is_doubtful: bool = False

    @property
    def name(self) -> str:
        """Its agent."""
        return self.said.name

    @property
    def process(self) -> Process | None:
        """It runs in, if it says so."""
        return self.said.process


class Farewells:
    """Attachments that are left, until all that they began is over."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._left: list[Attachment] = []

    @property
    def names(self) -> set[str]:
        """Agents that still have to be told."""
        return {one.name for one in self._left}

    def add(self, attachment: Attachment) -> None:
        """Nothing is begun by this attachment any more."""
        if attachment.number:
            self._left.append(attachment)

    def step(self, under_way: Collection[Attachment | None], attaching: Set[PeerId]) -> None:
        """Tell whom it can be said.

        Args:
            under_way: attachments that batches are still written by.
            attaching: peers that are attached anew: the target shall hear of the new attachment first, or a fence might
                land between the two.
        """
        kept: list[Attachment] = []
        for one in self._left:
            if one in under_way or one.peer in attaching:
                kept.append(one)
            elif not one.is_doubtful:  # of a doubtful one nothing can be said: the end of this process will
                self.say(one.name, one.number)
        self._left = kept

    def say(self, name: str, number: bytes) -> None:
        """Say that an attachment has written its last; if that gets lost the target waits for this process's end."""
        with contextlib.suppress(Exception):
            self._agent.tell(name, pack(Bye(number)))

    def close(self, attachments: Iterable[Attachment], under_way: Collection[Attachment | None]) -> None:
        """The engine is closed: tell all that can be told now."""
        for one in attachments:
            self.add(one)
        self.step(under_way, set())
        self._left.clear()
