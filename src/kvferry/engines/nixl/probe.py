"""A peer that is being attached: it is read from and written to before it counts as one that can be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from kvferry.engines.nixl.agent import Agent, Handle
from kvferry.engines.nixl.blob import Blob
from kvferry.engines.nixl.flight import Flight
from kvferry.engines.nixl.native import explain
from kvferry.engines.seam import Done, Outcome, Ticket
from kvferry.ids import PeerId

GIVEN_UP = "detached"
NO_ANSWER = "the peer did not answer within {:g} s; does its engine poll, and can its data address be reached?"


class Probe:
    """The way of an attach ticket: the nonce is read, so that it is the right peer, and then the peer is written to.

    The library connects on the first transfer, and the peer has to poll meanwhile.

    Attributes:
        peer: who is attached.
        ticket: the attach ticket.
        name: the peer's agent.
        blob: what it says of itself.
        done: how the ticket ended; None while it goes on.
    """

    def __init__(self, peer: PeerId, ticket: Ticket, blob: Blob, slot: int, deadline: float, timeout_s: float) -> None:
        self.peer = peer
        self.ticket = ticket
        self.name = blob.name
        self.blob = blob
        self.done: Done | None = None
        self._slot: int | None = slot
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._has_read = False
        self._is_told = False
        self._flight: Flight | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended, and the library has nothing of it any more."""
        return self.done is not None and self._flight is None

    @property
    def lands(self) -> bool:
        """Whether its news, not taken yet, is that the peer can be written to."""
        return not self._is_told and self.done is not None and self.done.outcome is Outcome.LANDED

    @property
    def failed(self) -> bool:
        """Whether the peer could not be written to; not that it was given up before."""
        return self.done is not None and self.done.outcome is not Outcome.LANDED and self.done.native != GIVEN_UP

    def begin(self, agent: Agent) -> None:
        """Ask for the nonce."""
        slot = self._slot
        assert slot is not None
        self._fly(agent, lambda: agent.read_nonce(self.name, self.blob.page, slot))

    def step(self, agent: Agent, now: float) -> None:
        """Go on as far as it goes."""
        while self._flight is not None:
            for found in self._flight.look(agent, now):
                if found.outcome is not Outcome.LANDED:
                    self._end(Outcome.FAILED_QUIET, self._cause(found), found.native)
            if not self._flight.over:
                return
            self._flight = None
            if self.done is None:
                self._next(agent)

    def take_news(self) -> Done | None:
        """How the ticket ended, once."""
        news = None if self._is_told else self.done
        self._is_told = self._is_told or news is not None
        return news

    def give_up(self, cause: str) -> None:
        """End the ticket, if it has not ended; what was begun is still waited for."""
        self._end(Outcome.FAILED_QUIET, cause, GIVEN_UP)

    def drop(self, agent: Agent) -> None:
        """Free what is left of it: it is over, or its peer was forgotten."""
        if self._flight is not None:
            self._flight.drop(agent)
            self._flight = None
        self._free(agent)

    def _next(self, agent: Agent) -> None:
        if self._has_read:
            self._end(Outcome.LANDED)
            return
        self._has_read = True
        if hashlib.sha256(self._free(agent)).digest() != self.blob.nonce_digest:
            self._end(Outcome.FAILED_QUIET, "another process answers in the peer's place", "nonce")
            return
        self._fly(agent, lambda: agent.write_page(self.name, self.blob.page))

    def _fly(self, agent: Agent, make: Callable[[], Handle]) -> None:
        try:
            handle = make()
        except Exception as error:  # noqa: BLE001 - whatever it raises: this peer can't be written to
            self._end(Outcome.FAILED_QUIET, *explain(error))
            return
        self._flight = Flight(self.ticket, self.name, [handle], self._deadline, self._timeout_s)
        self._flight.post(agent)

    def _free(self, agent: Agent) -> bytes:
        slot, self._slot = self._slot, None
        return agent.free_slot(slot) if slot is not None else b""

    def _cause(self, done: Done) -> str:
        return NO_ANSWER.format(self._timeout_s) if done.native == "deadline" else done.cause

    def _end(self, outcome: Outcome, cause: str = "", native: str = "") -> None:
        if self.done is None:
            self.done = Done(self.ticket, outcome, cause, native)
