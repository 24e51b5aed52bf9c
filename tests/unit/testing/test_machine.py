"""The state machine finds what it is there to find."""

import pytest

from kvferry.engines.local import LocalEngine
from kvferry.engines.seam import Caps, Outcome
from kvferry.testing import EngineMachine, EngineSuite, Faulty
from kvferry.testing.machine import run_machine


class Tcp(EngineSuite):
    options = {"mechanism": "tcp"}  # noqa: RUF012


class MixedUp(Tcp):
    """Every batch of the writer is mixed up."""

    def make_engine(self):
        faulty = Faulty(LocalEngine())
        faulty.mix_up(10_000)
        return faulty


class OneWrongByte(Tcp):
    def make_engine(self):
        faulty = Faulty(LocalEngine())
        faulty.flip_byte(10_000)
        return faulty


class Careless(LocalEngine):
    """Its target looks at no grant."""

    def open(self, config):
        super().open(config)
        config.grants.begin = lambda *_: ""
        config.grants.end = lambda *_: None


class LooksAtNoGrant(Tcp):
    def make_engine(self):
        return Careless()


@pytest.mark.parametrize("suite", [MixedUp, OneWrongByte])
def test_a_planted_fault_is_found(suite):
    with pytest.raises(AssertionError, match=r"bytes of .* differ"):
        run_machine(suite(), examples=20)


def test_a_target_that_looks_at_no_grant_is_found():
    with pytest.raises(AssertionError, match="without a grant"):
        run_machine(LooksAtNoGrant(), examples=400)


def test_a_right_engine_is_not():
    run_machine(Tcp(), examples=5)


def test_grants_are_dropped_only_where_they_are_looked_at():
    made = EngineMachine()
    try:
        assert made.checks_grants == (made.writer.engine.caps & (Caps.GRANTS | Caps.BLOCKING) == Caps.GRANTS)
    finally:
        made.teardown()


class Once(Faulty):
    """Misbehaves until a batch of any of its kind has landed with a wrong byte; never again in this process."""

    has_landed = False

    def __init__(self, inner):
        super().__init__(inner)
        self.altered = set()

    def submit(self, peer, batch):
        if Once.has_landed or not len(batch):
            return super().submit(peer, batch)
        self.flip_byte()
        ticket = super().submit(peer, batch)
        self.altered.add(ticket)
        return ticket

    def poll(self, budget_s):
        found = super().poll(budget_s)
        landed = {done.ticket for done in found if done.outcome is Outcome.LANDED}
        Once.has_landed = Once.has_landed or bool(landed & self.altered)
        return found


class NeverAgain(Tcp):
    def make_engine(self):
        return Once(LocalEngine())


def test_what_goes_wrong_once_is_told_with_the_calls_before_it():
    """An engine's threads run beside the test: what they did may not repeat."""
    Once.has_landed = False
    with pytest.raises(AssertionError, match=r"bytes of .* differ(.|\n)*\(after attach.*submit\(.*slots="):
        run_machine(NeverAgain(), examples=40)
