"""The simulator: real room books under a fake clock, with links that lose and engines that hold.

It drives the very proto objects that the node drives and holds no transition of its own. A world is two prefill and
two decode processes with tiny pools; rooms come and go, numbers are re-used, schedulers abort, processes are killed
and restarted, connections are lost while both ends live, messages are dropped, delayed, doubled and reordered, and
writes are held, fail, or end without a proof. After each step the invariants are checked:

1. a landing byte hits only a page that its claim owns;
2. its source page is still owned by its offer;
3. at Success every byte is right;
4. every object reaches one terminal state, once, and its pages are released once;
5. when the faults end, all rooms settle, all pages come back and the books are empty;
6. the messages of a room are bounded.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import Code, Reason
from kvferry.ids import PeerId
from kvferry.proto.effects import Digest, Effect, Expose, Fence, Revoke, Send, Stop, Submit, Times, Verify
from kvferry.testing.world_process import PAGE_TOKENS, Process, Room
from kvferry.wire import TransferInfo, TransferStatus, unpack_pages

TIMES = Times(
    tick_s=0.25, heartbeat_s=1.0, bootstrap_timeout_s=8.0, claim_timeout_s=8.0, stall_s=3.0, drain_limit_s=5.0
)
SETTLE_S = 90.0
MAX_MESSAGES_PER_LINK = 300


@dataclass
class Faults:
    """How much goes wrong; probabilities unless said."""

    lose: float = 0.05
    double: float = 0.10
    slow: float = 0.10
    max_delay_s: float = 2.0
    fail_write: float = 0.03
    hold_write: float = 0.05
    abort: float = 0.15
    kill: float = 0.02
    cut: float = 0.02
    reuse: float = 0.20


@dataclass
class Write:
    """One batch on its way: rows of (source page, destination page)."""

    source: Process
    target: Process
    source_epoch: int
    submit: Submit
    rows: list[tuple[int, int]]
    claim: int
    alive: bool = True


@dataclass
class Job:
    """One submitted chunk at its engine."""

    submit: Submit
    writes: list[Write] = field(default_factory=list)
    landed: int = 0
    stopped: bool = False


class World:
    """One seeded run; `run` returns the violations."""

    def __init__(self, seed: int, rooms: int, faults: Faults | None = None) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a seeded simulation, not a secret
        self.faults = faults or Faults()
        self.now = 0.0
        self.violations: list[str] = []
        self.messages = 0
        self.kills = 0
        self.finished: Counter[str] = Counter()
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._epochs = itertools.count(1)
        self._per_link: Counter[tuple[PeerId, int]] = Counter()
        self._writes: list[Write] = []
        self._used_rooms: list[int] = []
        self.grants = self.random.random() < 0.3
        self.digest = "sample" if self.random.random() < 0.7 else ""
        self.faulty = True
        self.prefill = [Process(self, "prefill", rank) for rank in range(2)]
        self.decode = [Process(self, "decode", rank) for rank in range(2)]
        self.processes = [*self.prefill, *self.decode]
        self.rooms = [self._make_room(uid) for uid in range(1, rooms + 1)]

    # -- running

    def at(self, delay: float, action: Callable[..., object], *args: Any) -> None:
        """Call an action later."""
        heapq.heappush(self._heap, (self.now + delay, next(self._order), action, args))

    def run(self) -> list[str]:
        """Play all rooms, then let everything settle; returns the violations."""
        start = 0.0
        for room in self.rooms:
            start += self.random.expovariate(2.5)
            self.at(start, self._start, room)
        for process in self.processes:
            self.at(self.random.random() * TIMES.tick_s, process.tick)
        self._advance(start + 10.0)
        self.faulty = False
        self._advance(self.now + 5.0)
        for process in self.processes:
            process.revive()
        self._advance(self.now + SETTLE_S)
        self._check_settled()
        return self.violations

    def _advance(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until and len(self.violations) < 5:
            self.now, _, action, args = heapq.heappop(self._heap)
            action(*args)
        self.now = until

    def violate(self, text: str) -> None:
        """Note a violated invariant."""
        self.violations.append(f"t={self.now:.3f} {text}")

    def chance(self, probability: float) -> bool:
        """Whether a fault of this probability happens now."""
        return self.faulty and self.random.random() < probability

    # -- rooms

    def _make_room(self, uid: int) -> Room:
        rng = self.random
        number = 1000 + uid
        if self._used_rooms and rng.random() < self.faults.reuse:
            number = rng.choice(self._used_rooms[-6:])
        self._used_rooms.append(number)
        pages = rng.randint(1, 4)
        return Room(
            uid=uid, number=number, pages=pages, prefix_pages=rng.choice([0, 0, 0, rng.randint(0, pages)]),
            knows_tokens=rng.random() < 0.6, shape=rng.choice(["one to one", "all to all", "replicas"]),
            chunks=rng.randint(1, min(3, pages)),
        )  # fmt: skip

    def _start(self, room: Room) -> None:
        for process in self.processes:
            process.begin(room)
        if self.chance(self.faults.kill):
            self.at(self.random.random() * 3, self._kill, self.random.choice(self.processes))
        if self.chance(self.faults.cut):
            pair = self.random.choice(self.decode), self.random.choice(self.prefill)
            self.at(self.random.random() * 3, self._cut, *pair)

    # -- connections

    def dial(self, decode: Process, prefill: Process) -> None:
        """Connect, as a decode process does when a room needs it."""
        if prefill in decode.dialing or prefill in decode.links:
            return
        decode.dialing.add(prefill)
        self.at(self.random.uniform(0.01, 0.3), self._connected, decode, decode.incarnation, prefill)

    def _connected(self, decode: Process, incarnation: int, prefill: Process) -> None:
        if decode.incarnation != incarnation or not decode.alive:
            return
        decode.dialing.discard(prefill)
        if not prefill.alive:
            return
        epoch = next(self._epochs)
        prefill.connected(decode, epoch)
        decode.connected(prefill, epoch)

    def _cut(self, decode: Process, prefill: Process) -> None:
        """The connection breaks although both live; each notices in its own time."""
        for one, other in ((decode, prefill), (prefill, decode)):
            peer = one.links.get(other)
            if one.alive and peer is not None:
                self.at(self.random.random() * 2, one.lost, one.incarnation, peer)

    def _kill(self, process: Process) -> None:
        if not process.alive:
            return
        self.kills += 1
        for write in self._writes:
            if write.source is process and write.alive and self.random.random() < 0.5:
                write.alive = False
        for other in self.processes:
            peer = other.links.get(process)
            if peer is not None and other.alive:
                self.at(self.random.random(), other.lost, other.incarnation, peer)
        process.die()
        self.at(self.random.uniform(0.3, 2.0), process.revive)

    # -- effects

    def perform(self, process: Process, effect: Effect) -> None:
        """Do what a book asked for, as far as it is the world's part."""
        if isinstance(effect, Send):
            self._send(process, effect)
        elif isinstance(effect, Submit):
            self._submit(process, effect)
        elif isinstance(effect, Stop):
            if effect.job in process.jobs:  # a digest is not stopped, it is over soon
                process.jobs[effect.job].stopped = True
        elif isinstance(effect, Digest):
            self.at(self.random.uniform(0.0, 0.3), process.digested, process.incarnation, effect)
        elif isinstance(effect, Verify):
            self.at(self.random.uniform(0.0, 0.3), process.verified, process.incarnation, effect)
        elif isinstance(effect, Expose):
            process.granted.update((peer, effect.claim) for peer in effect.peers)
        elif isinstance(effect, Revoke):
            process.granted.difference_update((peer, effect.claim) for peer in effect.peers)
        elif isinstance(effect, Fence):
            self._fence(process, process.incarnation, effect)

    def _send(self, process: Process, effect: Send) -> None:
        target = process.process_of(effect.peer)
        if target is None:
            return
        self.messages += 1
        sender = PeerId(process.incarnation, effect.peer.epoch)
        message = effect.message
        if isinstance(message, (TransferInfo, TransferStatus)):
            key = (sender if isinstance(message, TransferInfo) else effect.peer, message.claim)
            self._per_link[key] += 1
            if self._per_link[key] == MAX_MESSAGES_PER_LINK:
                self.violate(f"6: {MAX_MESSAGES_PER_LINK} messages for one link, the last {message}")
        if self.chance(self.faults.lose):
            return
        for _ in range(2 if self.chance(self.faults.double) else 1):
            delay = self.random.uniform(0.001, 0.02)
            if self.chance(self.faults.slow):
                delay = self.random.random() * self.faults.max_delay_s
            self.at(delay, target.hear, effect.peer.incarnation, sender, message)

    # -- the engine

    def _submit(self, process: Process, submit: Submit) -> None:
        job = process.jobs[submit.job] = Job(submit)
        target = process.process_of(submit.peer)
        rows = _rows(submit)
        if target is None:
            self.at(0.01, process.job_failed, process.incarnation, submit.job, "no connection", True)
            return
        halves = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        job.writes = [
            Write(process, target, submit.peer.epoch, submit, part, submit.info.claim) for part in halves if part
        ]
        if not job.writes:
            self.at(0.001, process.job_landed, process.incarnation, submit.job, 0)
        elif job.writes:
            self._post(process, process.incarnation, job, 0)

    def _post(self, process: Process, incarnation: int, job: Job, index: int) -> None:
        if process.incarnation != incarnation or not process.alive:
            return
        if index == len(job.writes):
            tokens = _tokens(job.submit)
            process.job_landed(incarnation, job.submit.job, tokens)
            return
        if job.stopped:
            process.job_failed(incarnation, job.submit.job, "stopped", True)
            return
        write = job.writes[index]
        self._writes.append(write)
        delay = self.random.uniform(0.002, 0.05)
        if self.chance(self.faults.hold_write):
            delay = self.random.uniform(1.0, 9.0)
        if self.chance(self.faults.fail_write):
            self._fail(process, incarnation, job, write)
            return
        self.at(delay, self._land, incarnation, job, index)

    def _fail(self, process: Process, incarnation: int, job: Job, write: Write) -> None:
        number = job.submit.job
        if self.random.random() < 0.5:
            write.alive = False
            self.at(0.01, process.job_failed, incarnation, number, "write failed", True)
            return
        self.at(0.01, process.job_failed, incarnation, number, "no answer", False)
        landing = self.random.uniform(0.1, 8.0)
        self.at(landing, self._touch, write, process.incarnation)
        self.at(landing + 0.1, process.job_quiet, incarnation, number)

    def _land(self, incarnation: int, job: Job, index: int) -> None:
        write = job.writes[index]
        refused = not self._touch(write, incarnation)
        process = write.source
        if process.incarnation != incarnation or not process.alive:
            return
        if refused:
            process.job_failed(incarnation, job.submit.job, "refused by the target", True)
            return
        process.book.job_progress(self.now, job.submit.job)
        self._post(process, incarnation, job, index + 1)

    def _touch(self, write: Write, incarnation: int) -> bool:
        """The bytes of a write arrive; False where the target refuses them."""
        if not write.alive:
            return True
        write.alive = False
        target, peer = write.target, write.submit.peer
        if not target.alive or target.incarnation != peer.incarnation:
            return True
        sender = PeerId(incarnation, peer.epoch)
        if self.grants and (sender, write.claim) not in target.granted:
            return False
        source_lives = write.source.alive and write.source.incarnation == incarnation
        for source_page, target_page in write.rows:
            if target.owner[target_page] != ("claim", write.claim):
                self.violate(
                    f"1: a write of claim {write.claim} hit page {target_page} of {target.name}, "
                    f"owned by {target.owner[target_page]}"
                )
            if source_lives and write.source.owner[source_page] != ("offer", write.submit.offer):
                self.violate(f"2: a write of offer {write.submit.offer} read a page it does not own")
            if source_lives:
                value = write.source.content[source_page]
                target.cells[target_page, write.source.rank] = value
        return True

    def _fence(self, process: Process, incarnation: int, effect: Fence) -> None:
        if process.incarnation != incarnation or not process.alive:
            return
        writes = [
            write for write in self._writes
            if write.alive and write.target is process and write.source_epoch == effect.peer.epoch
            and (effect.claim is None or write.claim == effect.claim)
        ]  # fmt: skip
        dead = not any(other.alive and other.incarnation == effect.peer.incarnation for other in self.processes)
        proven = self.grants and effect.claim is not None
        if proven or (dead and not writes):
            process.act(process.book.fence_done, effect.peer, effect.claim)
        else:
            self.at(0.5, self._fence, process, incarnation, effect)

    # -- the end

    def _check_settled(self) -> None:
        for process in self.processes:
            process.check_settled()

    def lost_reason(self, process: Process, peer: PeerId) -> Reason:
        """What a node says when a connection is gone."""
        return Reason(Code.PEER_LOST, process.side, str(process.rank), str(peer), "", "connection lost")


def _tokens(submit: Submit) -> int:
    first = submit.first_token + submit.chunk.first_page * PAGE_TOKENS
    count = len(unpack_pages(submit.chunk.pages["kv"]))
    low = max(first, submit.info.prefix_tokens)
    return max(0, min(first + count * PAGE_TOKENS, submit.end_tokens) - low)


def _rows(submit: Submit) -> list[tuple[int, int]]:
    """(source page, destination page) of the tokens of a chunk that the claim wants; equal page sizes."""
    source = unpack_pages(submit.chunk.pages["kv"])
    target = unpack_pages(submit.info.pages["kv"])
    first = submit.first_token // PAGE_TOKENS + submit.chunk.first_page
    prefix = submit.info.prefix_tokens // PAGE_TOKENS
    end = -(-submit.end_tokens // PAGE_TOKENS)
    return [
        (int(source[page - first]), int(target[page - prefix]))
        for page in range(max(first, prefix), min(first + len(source), end))
    ]
