"""A ticket that is with the library: one transfer or several, with a deadline of our own since the library has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.engines.nixl.agent import Agent, Handle
from kvferry.engines.nixl.farewell import Attachment
from kvferry.engines.nixl.native import NativeError, explain
from kvferry.engines.seam import Done, Outcome, Ticket


class Flight:
    """Posted transfers that one ticket stands for.

    A transfer that has failed proves nothing, and neither does the end of the deadline; but one that is done after all
    can't land anything more: then QUIET follows.

    Attributes:
        ticket: the ticket.
        name: the agent that is written to.
        attachment: what a batch is written by; None for what attaching begins.
    """

    def __init__(
        self, ticket: Ticket, name: str, handles: list[Handle], deadline: float, timeout_s: float,
        attachment: Attachment | None = None,
    ) -> None:  # fmt: skip
        self.ticket = ticket
        self.name = name
        self.attachment = attachment
        self._handles = handles
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._failure: NativeError | None = None
        self._is_told = False

    @property
    def over(self) -> bool:
        """Whether the library has nothing of it any more."""
        return not self._handles

    @property
    def failed(self) -> bool:
        """Whether the library has said that a part of it failed."""
        return self._failure is not None

    @property
    def overdue(self) -> bool:
        """Whether it has failed and is still under way."""
        return self._is_told and bool(self._handles)

    def post(self, agent: Agent) -> None:
        """Begin all of it, or as much as goes without a failure."""
        for handle in list(self._handles):
            if self._failure is None:
                self._advance(agent, handle, agent.post)
            else:
                self._end(agent, handle)

    def look(self, agent: Agent, now: float) -> Iterator[Done]:
        """See how far it is; gives what is to be told of it."""
        for handle in list(self._handles):
            self._advance(agent, handle, agent.is_done)
        yield from self.news(now)

    def news(self, now: float) -> Iterator[Done]:
        """What is to be told of it and was not told yet."""
        if not self._is_told and self._failure is not None:
            self._is_told = True
            yield Done(self.ticket, Outcome.FAILED_UNKNOWN, *self._failure)
        elif not self._is_told and self._handles and now >= self._deadline:
            self._is_told = True
            cause = f"not over after {self._timeout_s:g} s; it may still be written"
            yield Done(self.ticket, Outcome.FAILED_UNKNOWN, cause, "deadline")
        elif not self._handles and self._failure is None:
            yield Done(self.ticket, Outcome.QUIET if self._is_told else Outcome.LANDED)

    def drop(self, agent: Agent) -> None:
        """Free what is left of it, after its peer was forgotten."""
        for handle in list(self._handles):
            self._end(agent, handle)

    def _advance(self, agent: Agent, handle: Handle, step: Callable[[Handle], bool]) -> None:
        try:
            is_over = step(handle)
        except Exception as error:  # noqa: BLE001 - whatever it raises: it failed, and the table says what it means
            self._failure = self._failure or explain(error)
            is_over = True
        if is_over:
            self._end(agent, handle)

    def _end(self, agent: Agent, handle: Handle) -> None:
        self._handles.remove(handle)
        agent.release(handle)
