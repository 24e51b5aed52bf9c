"""The target's half of a fence: who may write here, and what proves that nothing of it can land any more.

A peer's attachment is over when its writer says so, which it does after its last batch was over; or when the writer's
process has ended, and after that

1. of each TCP connection that this process had then, or had not accepted yet, all that was on its way was read
   (`connections.may_land`): what a process had sent lies in the two kernels after its end, and lands when the library
   reads it here;
2. the library was then driven a few times more, so that what it had read is handled.

By cross-memory attach the writer's own process copies, and by the end of that it has ended too. Other ways are excluded
by `why_none`. The process is what the writer names, which by that can only make its own pages be reused too early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvferry.engines.host import Process, has_ended, host_identity
from kvferry.engines.nixl.agent import Agent
from kvferry.engines.nixl.connections import Marks, awaits_acceptance, may_land, own_sockets
from kvferry.engines.nixl.greeting import Bye, Hello, answer_to, place_of, unpack
from kvferry.engines.seam import Done, Outcome, Ticket
from kvferry.ids import PeerId

MAX_WRITERS = 1 << 16
"""A few hundred bytes each; writes that failed leave one until their process ends."""
LOOK_EVERY_S = 0.02
SWEEP_EVERY_S = 1.0
TURNS = 3
"""How often the library is driven after the last connection was seen empty."""

CLEAR_LOOKS = 2

_ELSEWHERE = "a process whose end can't be seen here, as on another host, has not said that it has stopped writing"
_LIVES = "its process has not ended, and has not said that it has stopped writing"
_ON_THE_WAY = "its process has ended, and bytes may still be on their way"


class Drain:
    """What a process that has ended may have left on the way."""

    def __init__(self) -> None:
        self._sockets: Marks | None = None
        self._turns = self._clear_looks = 0

    def step(self) -> bool:
        """Look once, after the library was driven; says whether nothing can land any more."""
        try:
            if self._sockets is None:
                self._begin()
            elif self._sockets:
                self._sockets = may_land(self._sockets)
            else:
                self._turns += 1
        except OSError:
            return False
        return self._turns >= TURNS

    def _begin(self) -> None:
        """Note the connections, once all that there will be are accepted: the process makes none any more."""
        # twice, since the table is no snapshot
        self._clear_looks = 0 if awaits_acceptance() else self._clear_looks + 1
        if self._clear_looks >= CLEAR_LOOKS:
            self._sockets = own_sockets()


class Writers:
    """Attachments that may write here, and fences that wait for their end.

    A peer whose fence has landed, or waits for all claims, is let in no more: what is proven stays true.
    """

    def __init__(self, agent: Agent, nonce: bytes) -> None:
        self._agent = agent
        self._nonce = nonce
        self._here = host_identity()
        self._writers: dict[bytes, tuple[PeerId, Process | None]] = {}
        self._barred: set[PeerId] = set()
        self._fences: dict[Ticket, PeerId] = {}
        self._drains: dict[Process, Drain] = {}
        self._looked_at = self._swept_at = 0.0

    def hear(self, messages: Iterable[bytes]) -> None:
        """Take what writers say; what makes no sense, or comes from one that can't read this memory, is ignored."""
        for raw in messages:
            message = unpack(raw)
            if isinstance(message, Bye):
                self._writers.pop(message.number, None)
            elif isinstance(message, Hello) and message.nonce == self._nonce:
                # noted before it is answered: from the answer on it may write
                let_in = self._admit(message)
                self._agent.answer(place_of(message.number), answer_to(message.number, let_in=let_in))

    def fence(self, ticket: Ticket, peer: PeerId, claim: int | None) -> None:
        """Wait for the end of all attachments of a peer; that it ends one claim only can't be seen."""
        if claim is None:
            self._barred.add(peer)
        self._fences[ticket] = peer

    def news(self, now: float) -> Iterator[Done]:
        """LANDED for fences whose peer can't write any more; called after the library was driven."""
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look(now)
        writing = {peer for peer, _ in self._writers.values()} if self._fences else set()
        for ticket, peer in list(self._fences.items()):
            if peer not in writing:
                del self._fences[ticket]
                self._barred.add(peer)
                yield Done(ticket, Outcome.LANDED)

    def why_waiting(self) -> dict[str, str]:
        """What each fence waits for, by peer; for people."""
        waiting = set(self._fences.values())
        return {str(peer): self._why(process) for peer, process in list(self._writers.values()) if peer in waiting}

    def __len__(self) -> int:
        """Attachments that may write here."""
        return len(self._writers)

    def _admit(self, hello: Hello) -> bool:
        if hello.number not in self._writers:
            if hello.peer in self._barred or len(self._writers) >= MAX_WRITERS:
                return False
            self._writers[hello.number] = hello.peer, hello.process
        return True

    def _look(self, now: float) -> None:
        is_sweep = now - self._swept_at >= SWEEP_EVERY_S
        if is_sweep:
            self._swept_at = now
        waiting = set(self._fences.values())
        writing = {process for peer, process in self._writers.values() if process and (is_sweep or peer in waiting)}
        for process in writing - self._drains.keys():
            if has_ended(process):
                self._drains[process] = Drain()
        for process in [process for process, drain in self._drains.items() if drain.step()]:
            del self._drains[process]
            self._writers = {number: one for number, one in self._writers.items() if one[1] != process}

    def _why(self, process: Process | None) -> str:
        if process is None or process.host != self._here:
            return _ELSEWHERE
        return _ON_THE_WAY if process in self._drains else _LIVES
