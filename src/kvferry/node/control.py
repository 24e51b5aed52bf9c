"""The control thread: it owns the sockets, the timers and all room state of a node.

It never waits for anything but its sockets: commands come from schedulers' threads, news from the mover and the
resolver, all as calls in one queue behind one descriptor. Ownership is a lock, the *turn*: a scheduler's or the
mover's thread that finds it free takes it, does what is short, and gives it back, which saves a room the way through
sleeping threads (ADR 0007). Handshakes, ticks and losses stay with the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvferry.errors import Code, Reason, in_words
from kvferry.ids import KVPoll
from kvferry.node.links import Received
from kvferry.node.performer import Performer
from kvferry.node.switchboard import Switchboard
from kvferry.node.turn import Turn
from kvferry.node.waiting import wait_for
from kvferry.proto.effects import Kind
from kvferry.proto.rules import LIVE_OFFERS

if TYPE_CHECKING:
    from kvferry.node.node import Node

log = logging.getLogger("kvferry.node")

FRAMES_A_TURN = 32
"""Frames of one connection that a thread takes in passing."""

LOOK_S = 20e-6
"""How often polls look for news."""

POLLED_S = 0.005
"""So long after a poll() the thread leaves the news to the next one."""

AFTER_POLL_S = 0.001
IDLE_POLL_S = 1.0


class Control:
    """The thread, its loop, and the turns that others take in its place."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.book = node.book
        self.links = node.links
        self.board = Switchboard(node)
        self._performer = Performer(node, self.board)
        self.calls: deque[Callable[[], None]] = deque()
        self.waiting_after: list[tuple[int, int, Callable[[], bool]]] = []
        self.running = True
        self.ended: Reason | None = None
        self.beat = time.monotonic()
        self._later: deque[Callable[[], None]] = deque()
        self._turn = Turn(Control.help)
        self._helper = threading.local()
        self._polled_at = 0.0
        self._was_spared = False
        self._pause_s = 0.0
        self._wakes_at = 0.0
        self._next_tick = 0.0
        self.thread = threading.Thread(target=self._main, name="kvferry-control", daemon=True)

    # -- any thread

    def call(self, action: Callable[[], None]) -> None:
        """Have something short done soon: here and now, unless another thread has the turn."""
        self.calls.append(action)
        if not getattr(self._helper, "at_it", False):
            self.help()

    def poll(self) -> None:
        """A scheduler asks for a room that has not ended: take the news for it."""
        now = time.monotonic()
        if now - self._polled_at > LOOK_S:  # a scheduler asks for one room after the other: the news are those of all
            self._polled_at = now
            if self.calls or self.links.has_news():
                self.help()

    def later(self, action: Callable[[], None]) -> None:
        """Have the thread itself do something that may take milliseconds."""
        self._later.append(action)
        self.links.wake()

    def help(self) -> None:
        """Do what there is to do, unless another thread is at it: that one looks again when it is through.

        Never waits. Nobody holds the turn while bytes are copied: what was posted is written after it.
        """
        self._helper.at_it = True
        looks = True
        try:
            while self.running and (self.calls or (looks and self.links.has_news())) and self._turn.try_take():
                looks = False  # each turn ends with a look
                try:
                    wake = self._short_turn()
                except BaseException as error:  # a signal handler of the caller's raised in the middle
                    self._die(error)
                    raise
                finally:
                    self._turn.give_back()
                self._help_others()
                if wake:
                    self.links.wake()
                    return
        finally:
            self._helper.at_it = False

    def _help_others(self) -> None:
        """What was posted during the turn and is small."""
        self.node.mover.help()
        self.node.digests.help()

    def run(self, action: Callable[[], None]) -> None:
        """Have the control thread do something, and wait for it; not for schedulers' calls."""
        done = threading.Event()

        def call() -> None:
            action()
            done.set()

        self.later(call)
        wait_for(done, self.thread, "the control thread", 30.0)

    # -- whoever has the turn

    def _short_turn(self) -> bool:
        """Take a few frames and all calls; returns whether the thread must be woken."""
        if not self.running:
            return False
        try:
            self._performer.begin_turn(leaves_thanks=True)
            for received in self.links.take(FRAMES_A_TURN) if self.links.has_news() else ():
                if self.board.is_short(received):
                    self._receive(received)
                else:
                    self._later.append(partial(self.board.received, received))
            if self._later:  # what came first goes first: the thread does both
                return True
            self._take_calls()
            return self.links.has_news() or self._oversleeps()
        except Exception as error:  # noqa: BLE001 - whatever it is, no state can be relied on any more
            self._die(error)
            return True

    def _oversleeps(self) -> bool:
        """Whether the thread, left alone, wakes too late for what has begun meanwhile."""
        sleeps_s = self._wakes_at - time.monotonic()
        if self._performer.owes_thanks and sleeps_s > 2 * POLLED_S:
            return True
        if self.waiting_after:
            return sleeps_s > 2 * AFTER_POLL_S
        return sleeps_s > self.node.config.tick_s + 2 * AFTER_POLL_S and self._timeout() < sleeps_s

    def _receive(self, received: Received) -> None:
        """Take a message after all calls made before it came: it may be the answer to one of them."""
        if self.calls and not self._later:
            self._take_calls()
        self.board.received(received)
        self.perform()

    def _take_calls(self) -> None:
        while self.calls:
            self.calls.popleft()()
            self.perform()  # what a call asks for is done before the next one changes what it is about
        if self.waiting_after:
            self._poll_after()
        self.perform()

    # -- the thread

    def _main(self) -> None:
        while self.running:
            self._sleep()
            if self._is_spared():
                continue
            self._turn.take()
            try:
                self._long_turn()
            finally:
                self._turn.give_back()
            self._help_others()
        self._turn.take()
        self.links.close()  # and the turn is nobody's any more

    def _sleep(self) -> None:
        """Leave the news to a scheduler that polls: it comes sooner than a thread that waits for the interpreter."""
        now = time.monotonic()
        if self.calls or self._later:
            self.links.wait(0.0)
        elif now - self._polled_at < POLLED_S:
            pause_s = min(POLLED_S, self._pause_s)
            self._wakes_at = now + pause_s
            self.links.wait(pause_s, for_news=False)
        elif self._was_spared:  # what was begun meanwhile is not in the pause
            self.links.wait(0.0)
        else:
            self.links.wait(self._pause_s)

    def _is_spared(self) -> bool:
        """Whether a scheduler that polls does all that is to be done.

        A turn of this thread, in which it loses the interpreter, would keep the scheduler from taking one for 5 ms.
        """
        now = time.monotonic()
        due = self.calls or self._later or self.waiting_after or self._performer.owes_thanks or now >= self._next_tick
        self._was_spared = not due and now - self._polled_at < POLLED_S
        return self._was_spared

    def _long_turn(self) -> None:
        try:
            self._performer.begin_turn(leaves_thanks=False)
            while self._later:
                self._later.popleft()()
                self.perform()
            for received in self.links.take():
                self._receive(received)
            self._take_calls()  # before the tick, which may forget a cleared room whose end is still to be shown
            now = self.beat = time.monotonic()
            if now >= self._next_tick:
                self._next_tick = now + self.node.config.tick_s
                self.book.on_tick(now)
                self.board.tick(now)
                self.node.claims.tick(now)
            self.perform()
            self._pause_s = self._timeout()
            self._wakes_at = time.monotonic() + self._pause_s
        except BaseException as error:  # noqa: BLE001 - whatever it is: nobody else would close the links
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """What must not happen: no state can be relied on any more, so every room fails and the thread ends."""
        self.running = False
        log.error("the control thread died", exc_info=error)
        problem = f"the control thread died: {error!r}"
        self.node.problem = self.node.problem or problem
        self._fail_rooms(self.node.where.reason(Code.INTERNAL, problem, stage="node"))

    def _fail_rooms(self, reason: Reason) -> None:
        """The thread ends: nobody else will tell those who wait, whether their rooms came to the book or not."""
        self.ended = reason
        for view in list(self.node.opening):
            view.end(reason)
        for view in list(self.node.views.values()):
            view.update(KVPoll.Failed, reason, foreign=False, bytes_landed=view.bytes_landed)

    def _timeout(self) -> float:
        if self.waiting_after:
            return AFTER_POLL_S
        if self.book.idle and all(conn.ready for conn in self.board.conns.by_link.values()):
            self._next_tick = min(self._next_tick, time.monotonic() + IDLE_POLL_S)
            return IDLE_POLL_S
        return max(0.0, self._next_tick - time.monotonic()) + 0.001

    def _poll_after(self) -> None:
        """Ask the events that chunks wait for."""
        still = []
        for offer, chunk, query in self.waiting_after:
            if not self._sends(offer):
                continue
            try:
                done = bool(query())
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - the caller's object; the room fails, nothing else
                cause = f"the chunk's `after` object raised in query(): {type(error).__name__}: {in_words(error)}"
                reason = self.node.where.reason(Code.INTERNAL, cause, stage="send")
                self.book.fail(time.monotonic(), Kind.OFFER, offer, reason)
                continue
            if done:
                self.book.chunk_ready(time.monotonic(), offer, chunk)
            else:
                still.append((offer, chunk, query))
        self.waiting_after = still

    def _sends(self, number: int) -> bool:
        offer = self.book.offers.get(number)
        return offer is not None and offer.state in LIVE_OFFERS

    # -- effects

    def perform(self) -> None:
        """Do what the book asks for."""
        self._performer.perform()

    # -- the end

    def leave(self, reason: Reason) -> None:
        """Say goodbye to every peer and end the loop."""
        self.board.leave(reason)
        self.running = False
        self._fail_rooms(reason)
