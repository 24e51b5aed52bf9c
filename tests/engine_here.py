"""Whether an engine's library is here; tests that need it are skipped with the install line where it is not."""

import pytest

from kvferry.engines import find
from kvferry.errors import EngineUnavailable
from kvferry.testing import settings


def need(engine):
    """Skip the calling test, or the calling module, unless the engine can be made; fail it with --kvferry-require."""
    try:
        find.load(engine)
    except EngineUnavailable as error:
        if "broken" in error.message:  # the adapter, not the library
            raise
        if engine in settings.current.required:
            pytest.fail(f"required, but not available: {error}", pytrace=False)
        pytest.skip(str(error), allow_module_level=True)
