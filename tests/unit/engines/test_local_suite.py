"""The engine suite over the mechanisms of the local engine."""

from typing import ClassVar

import pytest

from kvferry.engines.local import outbox, tcp_link
from kvferry.testing import EngineSuite


class TestCrossMemoryAttach(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "cma"}


class TestSharedMemory(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "shm"}
    cycles = 50
    memory = "kvferry.testing.suite_memory:memfd"


class TestTcp(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "tcp"}
    cycles = 50


class TestTcpOverSeveralConnections(EngineSuite):
    """With a second, third and fourth one whenever anything is on its way."""

    engine_name = "local"
    options: ClassVar = {"mechanism": "tcp", "tcp_connections": "4"}
    cycles = 10
    examples = 5

    @pytest.fixture(autouse=True)
    def eager(self, monkeypatch):
        monkeypatch.setattr(tcp_link, "MUCH_BYTES", 1)
        monkeypatch.setattr(outbox, "INLINE_BYTES", 0)


class TestWhicheverIsBest(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "auto"}
    cycles = 20
