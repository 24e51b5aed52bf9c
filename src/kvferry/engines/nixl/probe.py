"""A peer that is being attached: it is read from, written to and asked before batches are written to it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

import msgspec

from kvferry.engines.host import Process
from kvferry.engines.nixl.agent import NONCE_BYTES, Agent
from kvferry.engines.nixl.blob import Blob
from kvferry.engines.nixl.farewell import Attachment
from kvferry.engines.nixl.flight import Flight
from kvferry.engines.nixl.greeting import NUMBER_BYTES, Hello, answer_to, pack, place_of
from kvferry.engines.nixl.memory import Memory
from kvferry.engines.nixl.native import explain
from kvferry.engines.nixl.transfer import Transfer
from kvferry.engines.seam import Done, Outcome, Ticket
from kvferry.ids import PeerId

GIVEN_UP = "detached"
NO_ANSWER = "the peer did not answer within {:g} s; does its engine poll, and can its data address be reached?"
NOT_LET_IN = "the peer has proven that nothing of this connection can land there any more, or has too many writers"
SAY_AGAIN_S = 1.0


class Probe:
    """The way of an attach ticket.

    The nonce is read, so that it is the right peer, then the peer is written to, and then it is asked, if it wants to
    be: it notes who may write to it. The library connects on the first transfer, and the peer has to poll meanwhile.

    Attributes:
        peer: who is attached.
        ticket: the attach ticket.
        name: the peer's agent.
        number: that the peer knows the attachment by.
        done: how the ticket ended; None while it goes on.
    """

    def __init__(
        self, peer: PeerId, ticket: Ticket, blob: Blob, slot: int, deadline: float, timeout_s: float,
        incarnation: int, process: Process | None,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.ticket = ticket
        self.name = blob.name
        self.number = secrets.token_bytes(NUMBER_BYTES)
        self.done: Done | None = None
        self._blob = blob
        self._slot: int | None = slot
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._hello = Hello(self.number, b"", incarnation, peer.epoch, process)
        self._say_at = 0.0
        self._is_told = False
        self._flight: Flight | None = None
        self._next: Callable[[Agent], None] = self._check_nonce

    @property
    def over(self) -> bool:
        """Whether it has ended, and the library has nothing of it any more."""
        return self.done is not None and self._flight is None

    @property
    def has_landed(self) -> bool:
        """Whether the peer can be written to."""
        return self.done is not None and self.done.outcome is Outcome.LANDED

    @property
    def lands(self) -> bool:
        """Whether that is news which was not taken yet."""
        return not self._is_told and self.has_landed

    @property
    def failed(self) -> bool:
        """Whether the peer could not be written to; not that it was given up before, or did not want to."""
        return self.done is not None and not self.has_landed and self.done.native not in {GIVEN_UP, "barred"}

    @property
    def counts_there(self) -> bool:
        """Whether the peer may count the attachment as one, which will not come to be."""
        return bool(self._hello.nonce) and self.done is not None and not self.has_landed

    @property
    def attachment(self) -> Attachment:
        """What has landed."""
        said = self._blob
        number = self.number if said.answers else b""
        return Attachment(self.peer, said, Memory.of(said.memory()), number)

    def begin(self, agent: Agent) -> None:
        """Ask for the nonce."""
        self._read(agent, self._blob.page)

    def step(self, agent: Agent, now: float) -> None:
        """Go on as far as it goes."""
        if self.done is None and self._flight is None:
            self._ask(agent, now)
        while self._flight is not None:
            for found in self._flight.look(now):
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
            self._flight.drop()
            self._flight = None
        slot, self._slot = self._slot, None
        if slot is not None:
            agent.free_slot(slot)

    # -- one step after the other; each is called when what the one before has begun is over

    def _check_nonce(self, agent: Agent) -> None:
        nonce = self._found(agent)
        if hashlib.sha256(nonce).digest() != self._blob.nonce_digest:
            self._end(Outcome.FAILED_QUIET, "another process answers in the peer's place", "nonce")
            return
        if self._blob.answers:
            self._hello = msgspec.structs.replace(self._hello, nonce=nonce)
        self._next = self._was_written
        self._fly(lambda: agent.write_page(self.name, self._blob.page))

    def _was_written(self, _agent: Agent) -> None:
        if not self._blob.answers:
            self._end(Outcome.LANDED)
        self._next = self._take_answer

    def _ask(self, agent: Agent, now: float) -> None:
        """Say hello, now and then again since another's answer may have come in this one's place; look for it."""
        if now >= self._deadline:
            self._end(Outcome.FAILED_QUIET, NO_ANSWER.format(self._timeout_s), "deadline")
            return
        if now >= self._say_at:
            self._say_at = now + SAY_AGAIN_S
            try:
                agent.tell(self.name, pack(self._hello))
            except Exception as error:  # noqa: BLE001 - whatever it raises: this peer can't be asked
                self._end(Outcome.FAILED_QUIET, *explain(error))
                return
        self._read(agent, self._blob.answers + place_of(self.number) * NONCE_BYTES)

    def _take_answer(self, agent: Agent) -> None:
        found = self._found(agent)
        if found == answer_to(self.number, let_in=True):
            self._end(Outcome.LANDED)
        elif found == answer_to(self.number, let_in=False):
            self._end(Outcome.FAILED_QUIET, NOT_LET_IN, "barred")

    # -- helpers

    def _found(self, agent: Agent) -> bytes:
        assert self._slot is not None
        return agent.slot(self._slot)

    def _read(self, agent: Agent, there: int) -> None:
        slot = self._slot
        assert slot is not None
        self._fly(lambda: agent.read(self.name, there, slot))

    def _fly(self, make: Callable[[], Transfer]) -> None:
        try:
            transfer = make()
        except Exception as error:  # noqa: BLE001 - whatever it raises: this peer can't be written to
            self._end(Outcome.FAILED_QUIET, *explain(error))
            return
        self._flight = Flight(self.ticket, self.name, [transfer], self._deadline, self._timeout_s)
        self._flight.post()

    def _cause(self, done: Done) -> str:
        return NO_ANSWER.format(self._timeout_s) if done.native == "deadline" else done.cause

    def _end(self, outcome: Outcome, cause: str = "", native: str = "") -> None:
        if self.done is None:
            self.done = Done(self.ticket, outcome, cause, native)
