"""Whether an engine's library is here; tests that need it are skipped with the install line where it is not."""

import importlib.util
import sys
from pathlib import Path

import pytest

from kvferry.engines import find
from kvferry.errors import EngineUnavailable
from kvferry.testing import settings

MORI = {"engine_options": "backend=xgmi", "memory": "standin_memory:standin"}
"""MORI runs here over its XGMI backend with a stand-in for HIP (make mori)."""

ENGINES = ["local", "nixl", "mooncake", *(["mori"] if importlib.util.find_spec("mori") else [])]

sys.path.insert(0, str(Path(__file__).parent / "mori"))  # standin_memory is a module that second processes import, too


def of_cluster(engine):
    """What a cluster is told for it to run over an engine here."""
    return {"engine": engine, **(MORI if engine == "mori" else {})}


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
