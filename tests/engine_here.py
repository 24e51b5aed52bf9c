"""Whether an engine's library is here; tests that need it are skipped with the install line where it is not."""

import pytest

from kvferry.engines import find
from kvferry.errors import EngineUnavailable


def need(engine):
    """Skip the calling test, or the calling module, unless the engine can be made."""
    try:
        find.load(engine)
    except EngineUnavailable as error:
        pytest.skip(str(error), allow_module_level=True)
