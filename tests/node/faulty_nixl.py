"""NIXL's engine with faults, under the name "faulty-nixl", in the tests' process and in their workers."""

from kvferry.engines import find
from kvferry.engines.nixl import NixlEngine
from kvferry.testing.faulty import Faulty

NAME = "faulty-nixl"


class FaultyNixl(Faulty):
    """It holds back, delays and fails batches before the library sees them."""

    def __init__(self):
        super().__init__(NixlEngine())


def register():
    find.register(NAME, f"{__name__}:FaultyNixl")
