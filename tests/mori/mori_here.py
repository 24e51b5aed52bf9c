"""MORI by XGMI for tests: the engine suite's pair and processes over the stand-in, and what it can be told."""

import ctypes

from kvferry.testing.suite import EngineSuite

XGMI = {"backend": "xgmi"}


class Suite(EngineSuite):
    """The engine suite's pair and processes."""

    __test__ = False
    engine_name = "mori"
    options = XGMI
    memory = "standin_memory:standin"

    @property
    def engine(self):
        return self.pair.writer.engine


def opened(**options):
    """A suite whose pair is open, for a fixture."""
    made = Suite()
    made.options = {**XGMI, **options}
    made.setup_method()
    yield made
    made.teardown_method()


class Standin:
    """The stand-in's own functions."""

    def __init__(self):
        self._hip = ctypes.CDLL("libamdhip64.so.7")

    def hold(self):
        """Begin no copy until `release`."""
        self._hip.standin_hold_copies(1)

    def release(self):
        self._hip.standin_hold_copies(0)

    def refuse_copies(self, count):
        self._hip.standin_refuse_copies(count)
