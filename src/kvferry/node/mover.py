"""The mover: the one thread that calls the engine. Jobs become batches; batches become outcomes.

Jobs take turns batch by batch, so that a large room can't hold up a small one, and an abort is "submit no further
batch". A job ends when nothing of it is out any more, or when what is out ended without a proof; the proof (QUIET)
is reported when the engine has it.

Being "the one thread" is a lock, the *turn*: where the engine allows it (caps ANY_THREAD), the thread that posted a
small job takes the turn, if nothing else is to be done, and writes the job itself (ADR 0007).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

from kvferry.engines.seam import Batch, Caps, Done, Engine, Outcome, Ticket
from kvferry.ids import PeerId
from kvferry.node.jobs import Job, Reports
from kvferry.node.pace import Pace
from kvferry.node.turn import Turn
from kvferry.node.waiting import wait_for

log = logging.getLogger("kvferry.mover")

T = TypeVar("T")

SMALL_BYTES = 256 << 10
SMALL_ROWS = 64
"""What a thread that posts a job may write itself: some 30 us of copying."""

TELL_S = 0.02
"""How often a job says that it moves."""

BUSY_POLL_S = 0.001


class Mover:
    """Owns the engine's thread. All public methods may be called from any thread."""

    def __init__(
        self, engine: Engine, reports: Reports, batches_in_flight: int, is_written_to: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._reports = reports
        self._in_flight = batches_in_flight
        self._inbox: deque[Job | Callable[[], None]] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._turn = Turn(Mover.help)
        self._helped = Caps.ANY_THREAD in engine.caps
        self._pace = Pace(engine.caps, is_written_to)
        self._ready: deque[Job] = deque()
        self._jobs: dict[int, Job] = {}
        self._by_ticket: dict[Ticket, Job] = {}
        self._attaching: dict[Ticket, PeerId] = {}
        self._blobs: dict[PeerId, bytes] = {}
        self._doubted: set[PeerId] = set()
        self._fences: dict[Ticket, tuple[PeerId, int | None]] = {}
        self._peer_out: dict[PeerId, int] = {}
        self._running = True
        self._thread = threading.Thread(target=self._main, name="kvferry-mover", daemon=True)

    def start(self) -> None:
        """Start the thread; the engine is open already."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def write(self, job: int, peer: PeerId, batches: Callable[[], Iterator[Batch]], nbytes: int) -> None:
        """Post a job of at most nbytes bytes; it begins with the next `help`, on that thread or the mover's."""
        self._inbox.append(Job(job, peer, batches, nbytes))

    def stop(self, job: int) -> None:
        """Submit nothing more of a job."""
        self._post(lambda: self._stop(job))

    def attach(self, peer: PeerId, blob: bytes) -> None:
        """Connect the engine to a peer."""
        self._post(lambda: self._attach(peer, blob))

    def detach(self, peer: PeerId) -> None:
        """Let the engine forget a peer."""
        self._post(lambda: self._detach(peer))

    def fence(self, peer: PeerId, claim: int | None) -> None:
        """Ask for a proof."""
        self._post(lambda: self._fence(peer, claim))

    def help(self) -> None:
        """Write a small job that was posted, if the engine is idle; leave all else to the thread. Never waits."""
        if not self._inbox:
            return
        while self._helped and self._is_small() and self._turn.try_take():
            try:
                self._small_turn()
            except Exception as error:  # noqa: BLE001 - it is not this thread's to raise: the mover ends
                self._died(error)
            except BaseException as error:  # a signal handler of the caller's raised in the middle
                self._died(error)
                raise
            finally:
                self._turn.give_back()
        if self._inbox or self._jobs or self._doubted or self._by_ticket:
            self._bell.put(None)

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._bell.put(None)

    def ask(self, question: Callable[[Engine], T], timeout_s: float) -> T:
        """Ask the engine something on its own thread, and wait for the answer; raises what it raises.

        Raises:
            EngineError: the thread has ended, or no answer came within timeout_s.
        """
        done = threading.Event()
        answer: T | None = None
        error: Exception | None = None

        def call() -> None:
            nonlocal answer, error
            try:
                answer = question(self._engine)
            except Exception as caught:  # noqa: BLE001 - raised again, on the thread of whoever asked
                error = caught
            done.set()

        self._post(call)
        wait_for(done, self._thread, f"engine {self._engine.name}", timeout_s)
        if error is not None:
            raise error
        return cast("T", answer)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread and close the engine."""
        self._post(self._end)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- the thread

    def _main(self) -> None:
        try:
            pause_s = 0.0
            while self._running:
                self._sleep(0.0 if self._inbox else pause_s)
                self._turn.take()
                try:
                    self._take_inbox()
                    self._renew_doubted()
                    self._submit_some()
                    self._collect(BUSY_POLL_S if self._only_waits() else 0.0)
                    pause_s = self._pause_s()
                finally:
                    self._turn.give_back()
        except Exception as error:  # noqa: BLE001 - whatever it is, no outcome can be relied on any more
            self._died(error)
        finally:
            self._turn.take()
            self._running = False
            self._engine.close()  # and the turn is nobody's any more

    def _died(self, error: BaseException) -> None:
        self._running = False
        log.error("the mover of engine %s died", self._engine.name, exc_info=error)
        self._reports.broken(f"the mover thread of engine {self._engine.name} died: {error!r}")
        self._bell.put(None)

    def _pause_s(self) -> float:
        busy = bool(self._ready or self._attaching) or any(job.out for job in self._jobs.values())
        busy = busy or any(not self._peer_out.get(peer) for peer in self._doubted)
        return self._pace.pause_s(busy=busy, awaits_proof=bool(self._by_ticket or self._fences))

    def _sleep(self, pause_s: float) -> None:
        """Wait for the bell; whoever finds the turn taken leaves its job to who has it, who looks for it here."""
        with contextlib.suppress(queue.Empty):
            self._bell.get(pause_s > 0.0, pause_s or None)
            while True:
                self._bell.get_nowait()

    def _take_inbox(self) -> None:
        while self._inbox and self._running:
            item = self._inbox.popleft()
            if isinstance(item, Job):
                self._begin(item)
            else:
                item()

    def _is_small(self) -> bool:
        """Whether the next thing to do is a small job, and the only one."""
        try:
            item = self._inbox[0]
        except IndexError:
            return False
        alone = not self._jobs and not self._doubted  # who is doubted is connected anew first, by the thread
        return isinstance(item, Job) and item.nbytes <= SMALL_BYTES and alone

    def _small_turn(self) -> None:
        """Write one small job on the thread that posted it."""
        if not self._running or not self._is_small():
            return
        job = self._inbox.popleft()
        assert isinstance(job, Job)
        self._begin(job)
        if self._make_next(job) and job.peeked is not None and len(job.peeked) > SMALL_ROWS:
            return
        self._submit_some()
        self._collect(0.0)

    def _end(self) -> None:
        self._running = False

    def _attach(self, peer: PeerId, blob: bytes) -> None:
        self._blobs[peer] = blob
        try:
            self._attaching[self._engine.attach(peer, blob)] = peer
        except Exception as error:  # noqa: BLE001 - it acts on what a peer sent: that peer is refused, nothing else
            self._reports.attached(peer, str(error) or repr(error))

    def _renew_doubted(self) -> None:
        """Connect anew to peers to whom a write failed, once nothing is out to them.

        The control plane can stand while what the engine uses is broken: all later writes would fail as well.
        """
        for peer in [peer for peer in self._doubted if not self._peer_out.get(peer)]:
            self._doubted.discard(peer)
            if peer in self._blobs and peer not in self._attaching.values():
                self._attach(peer, self._blobs[peer])

    def _detach(self, peer: PeerId) -> None:
        self._blobs.pop(peer, None)
        # a late answer would be taken for one to the next connection of that name
        self._attaching = {ticket: other for ticket, other in self._attaching.items() if other != peer}
        try:
            self._engine.detach(peer)
        except Exception:
            log.exception("engine %s raised in detach of %s; nothing is concluded from it", self._engine.name, peer)

    def _fence(self, peer: PeerId, claim: int | None) -> None:
        try:
            self._fences[self._engine.fence(peer, claim)] = (peer, claim)
        except Exception:
            log.exception("engine %s raised in fence of %s: no proof, pages stay held", self._engine.name, peer)

    def _begin(self, job: Job) -> None:
        self._jobs[job.number] = job
        self._ready.append(job)

    def _stop(self, number: int) -> None:
        job = self._jobs.get(number)
        if job is not None and not job.cause:
            job.cause = "stopped"
            self._settle(job)

    def _submit_some(self) -> None:
        """One batch of each job that may submit one."""
        for _ in range(len(self._ready)):
            job = self._ready.popleft()
            if job.cause or job.exhausted:
                self._settle(job)
            elif self._must_wait(job.peer) or self._submit_next(job):
                self._ready.append(job)
            else:
                self._settle(job)

    def _submit_next(self, job: Job) -> bool:
        """Submit a batch, if there is one, and make the next; says whether there is one."""
        return self._make_next(job) and self._submit(job) and self._make_next(job)

    @staticmethod
    def _make_next(job: Job) -> bool:
        try:
            job.peek()
        except Exception as error:  # noqa: BLE001 - a plan that can't be made fails this room, not the mover
            job.cause = job.cause or f"the plan can't be made: {error}"
            return False
        return not job.exhausted

    def _submit(self, job: Job) -> bool:
        batch, job.peeked = job.peeked, None
        assert batch is not None
        try:
            ticket = self._engine.submit(job.peer, batch)
        except Exception as error:
            log.exception("engine %s raised in submit", self._engine.name)
            job.cause = f"engine {self._engine.name} raised in submit: {error!r}"
            job.unproven.add(-job.number)
            self._doubted.add(job.peer)
            return False
        job.out[ticket] = batch.total_bytes
        self._by_ticket[ticket] = job
        self._peer_out[job.peer] = self._peer_out.get(job.peer, 0) + 1
        return True

    def _only_waits(self) -> bool:
        """Whether all that is left to do is to wait for the engine."""
        out = bool(self._attaching) or any(job.out for job in self._jobs.values())
        return out and all(self._must_wait(job.peer) for job in self._ready)

    def _collect(self, budget_s: float) -> None:
        for done in self._engine.poll(budget_s):
            if done.ticket in self._attaching:
                peer = self._attaching.pop(done.ticket)
                self._reports.attached(peer, "" if done.outcome is Outcome.LANDED else _text(done))
            elif done.ticket in self._fences:
                peer, claim = self._fences.pop(done.ticket)
                if done.outcome is Outcome.LANDED:
                    self._reports.fenced(peer, claim)
            elif done.ticket in self._by_ticket:
                self._ended(self._by_ticket[done.ticket], done)

    def _must_wait(self, peer: PeerId) -> bool:
        return self._peer_out.get(peer, 0) >= self._in_flight or peer in self._attaching.values()

    def _ended(self, job: Job, done: Done) -> None:
        if done.outcome is Outcome.QUIET:
            self._proven(job, done.ticket)
            return
        nbytes = job.out.pop(done.ticket, None)
        if nbytes is None:
            return
        self._peer_out[job.peer] -= 1
        if done.outcome is Outcome.FAILED_UNKNOWN:
            job.unproven.add(done.ticket)
        else:
            del self._by_ticket[done.ticket]
        if done.outcome is Outcome.LANDED:
            job.landed_bytes += nbytes
            if not job.over and time.monotonic() - job.told_at > TELL_S:
                job.told_at = time.monotonic()
                self._reports.progress(job.number)
        elif not job.cause or job.cause == "stopped":
            job.cause = _text(done)
        if done.outcome is not Outcome.LANDED:
            self._doubted.add(job.peer)
        self._settle(job)

    def _proven(self, job: Job, ticket: Ticket) -> None:
        self._by_ticket.pop(ticket, None)
        job.unproven.discard(ticket)
        if job.over and not job.unproven:
            self._reports.quiet(job.number)

    def _settle(self, job: Job) -> None:
        """Report a job that has ended, once."""
        if not job.over or self._jobs.pop(job.number, None) is None:
            return
        if not self._peer_out.get(job.peer, 1):
            del self._peer_out[job.peer]
        if job.cause:
            self._reports.failed(job.number, job.cause, not job.unproven)
        else:
            self._reports.landed(job.number, job.landed_bytes)


def _text(done: Done) -> str:
    return f"{done.cause} [{done.native}]" if done.native else done.cause
