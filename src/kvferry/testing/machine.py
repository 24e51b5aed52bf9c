"""Random histories of one writer and two targets, against a numpy model of the targets' pools (needs hypothesis).

The model knows of each byte of a target what it must be. Rows of a ticket that has not ended may hold what was there
before or what the source holds; once the ticket is LANDED they hold the source's bytes, and once it is FAILED_QUIET or
QUIET they stay as they are. All other bytes, the guard bytes between and around the rows among them, never change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.engines.seam import Outcome, Ticket
from kvferry.testing.suite_base import SuiteBase
from kvferry.testing.suite_pair import CLAIM, SETTLE_S, End, batch_between

POOL_BYTES = 1 << 16
SLOT_BYTES = 512
SLOTS = POOL_BYTES // SLOT_BYTES

Bytes = npt.NDArray[np.uint8]


@dataclass
class _Row:
    """One row that is under way: where it starts, what it brings."""

    start: int
    brings: Bytes
    was_granted: bool


@dataclass
class _Modelled:
    """A target and what is known of it."""

    end: End
    expected: Bytes
    is_attached: bool = False
    is_granted: bool = False
    under_way: dict[Ticket, list[_Row]] = field(default_factory=dict)
    unknown: set[Ticket] = field(default_factory=set)

    def busy(self) -> set[int]:
        """Slots in which something may still land."""
        return {row.start // SLOT_BYTES for rows in self.under_way.values() for row in rows}


def _recorded(call: Callable[..., None]) -> Callable[..., None]:
    """Keep what went wrong and after which calls: an engine's threads run beside the test, so no history repeats."""

    @functools.wraps(call)
    def wrapper(self: EngineMachine, *args: Any, **arguments: Any) -> None:
        self.calls.append(f"{call.__name__}({', '.join(f'{name}={value}' for name, value in arguments.items())})")
        try:
            call(self, *args, **arguments)
        except Exception as error:
            self.failures.append((error, [name for name in self.calls if not name.startswith("pools_")]))
            raise

    return wrapper


class EngineMachine(RuleBasedStateMachine):
    """Attach, detach, attach again, submit, poll, drop and give grants; subclasses set the suite.

    Attributes:
        suite: how engines are made and opened.
        failures: what went wrong in any history, and the calls before it.
    """

    suite: SuiteBase = SuiteBase()
    failures: ClassVar[list[tuple[Exception, list[str]]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        suite = self.suite
        self.writer = suite.make_end(1, POOL_BYTES)
        self.source: Bytes = np.random.default_rng(11).integers(0, 256, POOL_BYTES, np.uint8)
        self.writer.pool[:] = self.source
        ends = [suite.make_end(number, POOL_BYTES) for number in (2, 3)]
        self.targets = [_Modelled(end, end.pool.copy()) for end in ends]
        self.checks_grants = suite.target_writes_of(self.writer.engine)

    def teardown(self) -> None:
        """Let everything end, look once more, and close."""
        try:
            self.settle()
            self.pools_are_the_model()
        finally:
            for end in (self.writer, *(target.end for target in self.targets)):
                end.engine.close()

    @initialize()
    @_recorded
    def attach_to_both(self) -> None:
        """So that most histories write something."""
        for which in (0, 1):
            self.attach(which=which)

    @rule(which=st.integers(0, 1))
    @_recorded
    def attach(self, which: int) -> None:
        """Attach, or attach again: what was under way has ended or is quiet afterwards, or stays unknown."""
        target = self.targets[which]
        if not target.is_granted:
            target.end.grant(self.writer.me)
            target.is_granted = True
        ticket = self.writer.engine.attach(target.end.me, target.end.engine.describe())
        done = self.writer.wait(ticket, SETTLE_S, self._poll)
        assert done.outcome is Outcome.LANDED, done
        target.is_attached = True

    @rule(which=st.integers(0, 1))
    @_recorded
    def detach(self, which: int) -> None:
        """From the writer's side."""
        self.writer.engine.detach(self.targets[which].end.me)
        self.targets[which].is_attached = False

    @rule(
        which=st.integers(0, 1),
        slots=st.sets(st.integers(0, SLOTS - 1), min_size=1, max_size=24),
        seed=st.integers(0, 999),
    )
    @_recorded
    def submit(self, which: int, slots: set[int], seed: int) -> None:
        """Rows into slots in which nothing is under way, each with guard bytes around it."""
        target, random = self.targets[which], np.random.default_rng(seed)
        rows = sorted(slots - target.busy())[: self.writer.engine.limits.rows]
        random.shuffle(rows)
        nbytes = random.integers(1, SLOT_BYTES - 2, len(rows))
        dst = np.array(rows, np.int64) * SLOT_BYTES + 1
        src = random.integers(0, POOL_BYTES - SLOT_BYTES, len(rows))
        batch = batch_between(self.writer, target.end.address, src, dst, nbytes)
        ticket = self.writer.engine.submit(target.end.me, batch)
        target.under_way[ticket] = [
            _Row(int(there), self.source[here : here + length], target.is_granted)
            for here, there, length in zip(src, dst, nbytes, strict=True)
        ]

    @rule()
    @_recorded
    def poll(self) -> None:
        """Once, at each end."""
        self._poll()
        self.writer.poll(0.001)
        self._take()

    @rule()
    @_recorded
    def settle(self) -> None:
        """Until all tickets have a first outcome."""
        for target in self.targets:
            for ticket in list(target.under_way):
                if ticket not in target.unknown:
                    self._ended(target, ticket, self.writer.wait(ticket, SETTLE_S, self._poll).outcome)
        self._take()

    @precondition(lambda self: self.checks_grants)
    @rule(which=st.integers(0, 1))
    @_recorded
    def drop(self, which: int) -> None:
        """Take the grant back while nothing is under way; from now on rows must be refused."""
        target = self.targets[which]
        if not target.busy():
            target.end.grants.drop(self.writer.me, CLAIM)
            target.is_granted = False

    @precondition(lambda self: self.checks_grants)
    @rule(which=st.integers(0, 1))
    @_recorded
    def give(self, which: int) -> None:
        """Give the grant again, while nothing is under way."""
        if not self.targets[which].is_granted and not self.targets[which].busy():
            self.targets[which].end.grant(self.writer.me)
            self.targets[which].is_granted = True

    @invariant()
    @_recorded
    def pools_are_the_model(self) -> None:
        """Every byte of both pools is what the model says, or one of the two that it may be."""
        for target in self.targets:
            actual, allowed = target.end.pool.copy(), target.expected.copy()
            for rows in target.under_way.values():
                for row in rows:
                    place = slice(row.start, row.start + len(row.brings))
                    has_come = actual[place] == row.brings
                    allowed[place][has_come] = row.brings[has_come]
            differing = np.flatnonzero(actual != allowed)
            assert not len(differing), f"{len(differing)} bytes of {target.end.me} differ, the first at {differing[0]}"

    def _poll(self) -> None:
        for target in self.targets:
            target.end.poll(0)

    def _take(self) -> None:
        """Apply the outcomes that have come by themselves."""
        for target in self.targets:
            for ticket in list(target.under_way):
                done = self.writer.take(ticket)
                if done is not None:
                    self._ended(target, ticket, done.outcome)

    def _ended(self, target: _Modelled, ticket: Ticket, outcome: Outcome) -> None:
        if outcome is Outcome.FAILED_UNKNOWN:
            target.unknown.add(ticket)
            return
        rows = target.under_way.pop(ticket)
        for row in rows:
            place = slice(row.start, row.start + len(row.brings))
            if outcome is Outcome.LANDED:
                target.expected[place] = row.brings
            else:  # a part may have landed before it failed; which one is checked by the invariant before
                came = target.end.pool[place] == row.brings
                target.expected[place][came] = row.brings[came]
        target.unknown.discard(ticket)
        if outcome is Outcome.LANDED and self.checks_grants:
            assert all(row.was_granted for row in rows), f"ticket {ticket} is LANDED without a grant"


def run_machine(suite: SuiteBase, examples: int, steps: int = 30) -> None:
    """Run random histories; raises AssertionError with the first one that goes wrong.

    It is not made shorter: that would run it some hundred times more, and a second each is usual for foreign engines.

    Args:
        suite: how engines are made.
        examples: histories to try.
        steps: calls in the longest of them.
    """
    failures: list[tuple[Exception, list[str]]] = []
    machine = type("SuiteMachine", (EngineMachine,), {"suite": suite, "failures": failures})
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    flaky: Flaky | None = None
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except Flaky as unrepeatable:
        flaky = unrepeatable
        if not failures:
            raise
    if failures:  # it went wrong once, and not in the same way when it was done again: once is enough
        error, calls = failures[0]
        raise AssertionError(f"{error} (after {'; '.join(calls)})") from flaky
