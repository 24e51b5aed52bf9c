"""Group `errors`: every failure says what happened and what the library said; calls out of order are refused."""

from __future__ import annotations

import contextlib
import time
from typing import ClassVar

import numpy as np
import pytest

from kvferry.engines.grants import GrantTable
from kvferry.engines.seam import Batch, Done, EngineConfig, Outcome
from kvferry.errors import ConfigError, EngineError
from kvferry.ids import PeerId
from kvferry.testing.strangers import listeners, shout
from kvferry.testing.suite_base import FAILED, POOL_BYTES, SuiteBase
from kvferry.testing.suite_pair import GUARD


class Errors(SuiteBase):
    """Causes in words, native codes as text, and the order of calls."""

    group: ClassVar[str] = "errors"

    def test_every_kind_of_failure_has_a_cause_and_a_native_code(self) -> None:
        """Before and after attaching, by blob, rows, sizes, limits, and of a peer that is detached."""
        pair = self.pair
        failures = {"not attached": pair.write(pair.batch([0], [0], [10]))}
        failures["garbage"] = pair.settle(pair.writer.engine.attach(pair.target.me, b"garbage"))
        failures["after a failed attach"] = pair.write(pair.batch([0], [0], [10]))
        assert pair.attach().outcome is Outcome.LANDED
        failures["source"] = pair.write(pair.batch([POOL_BYTES], [0], [10]))
        good = pair.batch([0], [0], [10])
        failures["total"] = pair.write(Batch(good.src, good.dst, good.nbytes, 9, good.claim))
        failures["shape"] = pair.write(Batch(good.src, np.append(good.dst, good.dst), good.nbytes, 10, good.claim))
        many = np.arange(pair.writer.engine.limits.rows + 1)
        failures["limits"] = pair.write(pair.batch(many, many, np.ones(len(many))))
        pair.writer.engine.detach(pair.target.me)
        failures["detached"] = pair.write(good)
        for what, done in failures.items():
            _assert_told(what, done)
            assert done.outcome is Outcome.FAILED_QUIET, what
        self.assert_untouched()

    def test_a_peer_that_is_gone_is_told_with_a_cause_and_a_native_code(self) -> None:
        """By the batch, and by the next attach."""
        process = self.spawn_target()
        process.kill()
        for done in (self.write_to(process), self.write_to(process), self.settled_attach(process)):
            _assert_told("killed", done)
            assert done.outcome in FAILED

    def test_strangers_at_the_ports_of_a_process_cost_it_nothing(self) -> None:
        """Garbage and silence at each TCP port that its engine listens on, before and after it has a peer."""
        process = self.spawn_target()
        shout(listeners(process.pid))
        assert self.write_to(process).outcome is Outcome.LANDED
        made = shout(listeners(process.pid))
        said = f"after {made} connections of strangers"
        assert self.write_to(process).outcome is Outcome.LANDED, said
        there = bytes.fromhex(process.do("bytes", offset=0, nbytes=process.nbytes)["bytes"])
        assert there == self.pair.writer.pool[:50].tobytes() + bytes([GUARD]) * (process.nbytes - 50), said
        assert self.settled_attach(process).outcome is Outcome.LANDED, said

    def test_an_attach_that_is_detached_or_replaced_at_once_ends(self) -> None:
        """With an outcome, and a cause if it failed: no ticket is forgotten."""
        pair = self.pair
        pair.target.grant(pair.writer.me)
        first = pair.writer.engine.attach(pair.target.me, pair.target.engine.describe())
        second = pair.writer.engine.attach(pair.target.me, pair.target.engine.describe())
        pair.writer.engine.detach(pair.target.me)
        for ticket in (first, second):
            done = pair.settle(ticket)
            if done.outcome is not Outcome.LANDED:
                _assert_told("detached", done)
        _assert_told("after it", pair.write(pair.batch([0], [0], [10])))
        assert pair.attach().outcome is Outcome.LANDED

    def test_an_option_that_is_unknown_is_named_and_the_engine_can_still_be_opened(self) -> None:
        """A typing error must not go unnoticed."""
        with contextlib.closing(self.make_engine()) as engine:
            with pytest.raises(ConfigError, match="no_such_option"):
                engine.open(self._config(no_such_option="1"))
            engine.open(self._config())

    def test_an_engine_is_opened_once(self) -> None:
        """The second time is refused, and does no harm to the first."""
        with pytest.raises(EngineError, match="open"):
            self.pair.writer.engine.open(self._config())
        assert self.pair.attach().outcome is Outcome.LANDED

    def test_calls_before_open_and_after_close_say_so_and_close_may_be_called_at_any_time(self) -> None:
        """None of them crashes, and none pretends."""
        with contextlib.closing(self.make_engine()) as engine:
            engine.close()
            with pytest.raises(EngineError, match="open"):
                engine.describe()
            engine.open(self._config())
            engine.close()
            engine.close()
            for call in (engine.describe, lambda: engine.poll(0), lambda: engine.attach(PeerId(2), b"")):
                with pytest.raises(EngineError, match="open"):
                    call()

    def test_polling_with_no_budget_does_not_wait_and_an_idle_poll_ends_within_its_budget(self) -> None:
        """Nothing is under way."""
        engine = self.pair.writer.engine
        before = time.monotonic()
        assert [engine.poll(0) for _ in range(3)] == [[], [], []]
        assert engine.poll(0.1) == []
        assert time.monotonic() - before < 1.5

    def test_detaching_somebody_unknown_does_nothing(self) -> None:
        """Neither before nor after others have attached."""
        self.pair.writer.engine.detach(PeerId(12345))
        assert self.pair.attach().outcome is Outcome.LANDED
        self.pair.writer.engine.detach(PeerId(12345))
        self.pair.target.engine.detach(PeerId(12345))
        assert self.pair.write(self.pair.batch([0], [0], [10])).outcome is Outcome.LANDED

    def _config(self, **more: str) -> EngineConfig:
        return EngineConfig(PeerId(9), GrantTable(), options={**self.options, **more})


def _assert_told(what: str, done: Done) -> None:
    assert done.outcome in FAILED, (what, done)
    assert done.cause, (what, done)
    assert done.native, (what, done)
