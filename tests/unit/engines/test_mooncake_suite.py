"""The engine suite over Mooncake by TCP."""

from typing import ClassVar

from mooncake_here import need_mooncake

from kvferry.testing.suite import EngineSuite

need_mooncake()


class TestMooncake(EngineSuite):
    engine_name = "mooncake"
    options: ClassVar = {"timeout_s": "5"}
