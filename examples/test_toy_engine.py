"""The engine suite for the toy engine: python -m pytest test_toy_engine.py --kvferry-require toy."""

from kvferry.engines import find
from kvferry.testing import EngineSuite

find.register("toy", "toy_engine:ToyEngine")


class TestToy(EngineSuite):
    """All of it; nothing but the name is the engine's own."""

    engine_name = "toy"
