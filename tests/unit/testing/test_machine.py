"""The state machine finds what it is there to find."""

import pytest

from kvferry.engines.local import LocalEngine
from kvferry.engines.seam import Caps
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
        run_machine(LooksAtNoGrant(), examples=30)


def test_a_right_engine_is_not():
    run_machine(Tcp(), examples=5)


def test_grants_are_dropped_only_where_they_are_looked_at():
    made = EngineMachine()
    try:
        assert made.checks_grants == (made.writer.engine.caps & (Caps.GRANTS | Caps.BLOCKING) == Caps.GRANTS)
    finally:
        made.teardown()
