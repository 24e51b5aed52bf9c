"""For all tests."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # engine_here is a module of its own

import pytest

from kvferry.engines import find
from kvferry.errors import EngineUnavailable

# a shell without job control starts background jobs with SIGINT ignored, and every process below inherits it
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def need_engine():
    """need_engine("mooncake"): skips the test where the engine's library is not installed, with the install line."""

    def check(name):
        try:
            find.load(name)
        except EngineUnavailable as error:
            if "broken" in error.message:  # the adapter, not the library
                raise
            pytest.skip(str(error))

    return check
