"""The engine suite over transports of the NIXL engine."""

from typing import ClassVar

from engine_here import need
from kvferry.testing.suite import EngineSuite

need("nixl")


class TestWhicheverUcxPicks(EngineSuite):
    """Cross-memory attach, where the kernel allows it."""

    engine_name = "nixl"


class TestTcp(EngineSuite):
    engine_name = "nixl"
    options: ClassVar = {"param.engine_config": "TLS=tcp"}
    cycles = 5
