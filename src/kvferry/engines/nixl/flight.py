"""A ticket that is with the library: one transfer or several, with a deadline of our own since the library has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.engines.nixl.farewell import Attachment
from kvferry.engines.nixl.native import NativeError, explain
from kvferry.engines.nixl.transfer import Transfer
from kvferry.engines.owner import keep_in_forks
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
        self, ticket: Ticket, name: str, transfers: list[Transfer], deadline: float, timeout_s: float,
        attachment: Attachment | None = None,
    ) -> None:  # fmt: skip
        self.ticket = ticket
        self.name = name
        self.attachment = attachment
        self._left = transfers
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._failure: NativeError | None = None
        self._is_told = False

    @property
    def over(self) -> bool:
        """Whether the library has nothing of it any more."""
        return not self._left

    @property
    def failed(self) -> bool:
        """Whether the library has said that a part of it failed."""
        return self._failure is not None

    @property
    def overdue(self) -> bool:
        """Whether it has failed and is still under way."""
        return self._is_told and bool(self._left)

    def post(self) -> None:
        """Begin all of it, or as much as goes without a failure."""
        for transfer in list(self._left):
            if self._failure is None:
                self._advance(transfer, transfer.begin)
            else:
                self._end(transfer)
        if self._left:  # to free it in a child would wait for a lock that a thread of the parent may have
            keep_in_forks(self)

    def look(self, now: float) -> Iterator[Done]:
        """See how far it is; gives what is to be told of it."""
        for transfer in list(self._left):
            self._advance(transfer, transfer.is_over)
        yield from self.news(now)

    def news(self, now: float) -> Iterator[Done]:
        """What is to be told of it and was not told yet."""
        if not self._is_told and self._left and now >= self._deadline:
            self._is_told = True
            cause = f"not over after {self._timeout_s:g} s; it may still be written"
            yield Done(self.ticket, Outcome.FAILED_UNKNOWN, *(self._failure or (cause, "deadline")))
        elif not self._is_told and not self._left and self._failure is not None:
            # not before the other parts are over: who hears of it attaches anew
            self._is_told = True
            yield Done(self.ticket, Outcome.FAILED_UNKNOWN, *self._failure)
        elif not self._left and self._failure is None:
            yield Done(self.ticket, Outcome.QUIET if self._is_told else Outcome.LANDED)

    def drop(self) -> None:
        """Free what is left of it, after its peer was forgotten."""
        for transfer in list(self._left):
            self._end(transfer)

    def _advance(self, transfer: Transfer, step: Callable[[], bool]) -> None:
        try:
            is_over = step()
        except Exception as error:  # noqa: BLE001 - whatever it raises: it failed, and the table says what it means
            self._failure = self._failure or explain(error)
            is_over = True
        if is_over:
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        self._left.remove(transfer)
        transfer.free()
