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


class TestSharedMemoryOfUcx(EngineSuite):
    """Without error handling UCX uses it; a lost peer is noticed by the engine's own deadline only."""

    engine_name = "nixl"
    options: ClassVar = {
        "ucx_error_handling_mode": "none", "param.engine_config": "TLS=posix,sysv,self,tcp", "transfer_timeout_s": "1",
    }  # fmt: skip
    cycles = 5
