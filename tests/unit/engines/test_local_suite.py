"""The engine suite over both mechanisms of the local engine."""

from typing import ClassVar

from kvferry.testing.suite import EngineSuite


class TestCrossMemoryAttach(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "cma"}


class TestTcp(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "tcp"}


class TestWhicheverIsBest(EngineSuite):
    engine_name = "local"
    options: ClassVar = {"mechanism": "auto"}
