"""Agents of peers that the library knows, kept while they may be of use: to forget one costs a connection.

UCX does not close a connection that the other side may use as well. To forget an agent and to load it again leaves one
more open on both sides, for as long as both processes live; to keep it leaves none.
"""

from __future__ import annotations

from collections.abc import Set

from kvferry.engines.nixl.agent import Agent
from kvferry.engines.nixl.blob import Blob
from kvferry.errors import WireError

KEPT = 256
"""Agents that nobody needs at the moment; the oldest are forgotten beyond that."""


class Peers:
    """Loaded agents by name, in the order in which they were loaded."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._loaded: dict[str, bytes] = {}
        self._doubted: set[str] = set()

    def load(self, said: Blob, in_use: Set[str]) -> None:
        """Make sure that a peer's agent is known with what its blob says.

        Args:
            said: the blob.
            in_use: agents that something is under way to: it would never end if they were forgotten.

        Raises:
            WireError: the metadata is another agent's, or is new while something is under way to the agent.
            Exception: what the library raises when it does not take the metadata.
        """
        if self._loaded.get(said.name) == said.digest and said.name not in self._doubted:
            return
        if said.name in in_use:
            # the library takes additions to what it knows, but no region that was registered anew
            raise WireError(f"batches are still under way to what {said.name!r} had registered before")
        self._forget(said.name)
        name = self._agent.load(said.metadata)
        if name != said.name:
            self._loaded.setdefault(name, b"")
            self._doubted.add(name)
            raise WireError(f"the peer's NIXL blob says that its agent is {said.name!r}, its metadata says {name!r}")
        self._loaded[name] = said.digest

    def doubt(self, name: str) -> None:
        """A transfer to an agent has failed: it is connected anew when it is needed again."""
        self._doubted.add(name)

    def forget_unused(self, wanted: Set[str]) -> set[str]:
        """Forget agents that nobody wants if they are doubted or too many; returns their names."""
        unused = [name for name in self._loaded if name not in wanted]
        gone = {name for name in unused if name in self._doubted} | set(unused[: max(len(unused) - KEPT, 0)])
        for name in gone:
            self._forget(name)
        return gone

    def __len__(self) -> int:
        """Agents that are loaded."""
        return len(self._loaded)

    def forget_all(self) -> None:
        """Disconnect from all."""
        for name in list(self._loaded):
            self._forget(name)

    def _forget(self, name: str) -> None:
        if self._loaded.pop(name, None) is not None:
            self._agent.forget(name)
        self._doubted.discard(name)
