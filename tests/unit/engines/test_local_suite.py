"""The engine suite over the mechanisms of the local engine."""

from typing import ClassVar

from kvferry.testing.suite import EngineSuite


class TestCrossMemoryAttach(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "cma"}


class TestSharedMemory(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "shm"}
    memory = "kvferry.testing.suite_memory:memfd"


class TestTcp(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "tcp"}


class TestWhicheverIsBest(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "auto"}


class TestWhicheverIsBestIntoSharedPools(TestWhicheverIsBest):
    cycles = 5
    memory = "kvferry.testing.suite_memory:memfd"
