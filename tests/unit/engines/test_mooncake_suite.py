"""The engine suite over Mooncake by TCP."""

from typing import ClassVar

from engine_here import need
from kvferry.testing.suite import EngineSuite

need("mooncake")


class TestMooncake(EngineSuite):
    engine_name = "mooncake"
    options: ClassVar = {"timeout_s": "5"}
