"""The engine suite over MORI's XGMI backend, with the stand-in for HIP (make mori)."""

from typing import ClassVar

import pytest

from kvferry.testing.suite import EngineSuite

pytestmark = pytest.mark.mori


class TestXgmi(EngineSuite):
    engine_name = "mori"
    options: ClassVar = {"backend": "xgmi"}
    memory = "standin_memory:standin"
    label = "mori XGMI-standin"
