"""The engine suite over transports of the NIXL engine."""

from typing import ClassVar

import pytest

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


class TestTcpByTheEnvironment(EngineSuite):
    """As people set it for other programs; the second process inherits it."""

    engine_name = "nixl"
    cycles = 5

    @classmethod
    def setup_class(cls):
        cls.environment = pytest.MonkeyPatch()
        cls.environment.setenv("UCX_TLS", "tcp")

    @classmethod
    def teardown_class(cls):
        cls.environment.undo()
