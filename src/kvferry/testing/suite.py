"""The engine suite: what every engine has to show, by capability.

A back-end's test file is a few lines:

    from kvferry.testing import EngineSuite

    class TestMyEngine(EngineSuite):
        engine_name = "mine"
        options = {"setting": "value"}
        memory = "kvferry.testing.suite_memory:memfd"  # if it needs memory of its own kind

Each row of the page on what proves quiet is shown here; what is not shown is not claimed. The tests are in groups, one
mixin each; capability, never an engine's name, decides what runs. Where a capability is missing, a test shows that what
needs it is refused. The pytest plug-in (`kvferry.testing.plugin`) prints engines and groups as a matrix.
"""

from __future__ import annotations

from kvferry.testing.groups.blobs import Blobs
from kvferry.testing.groups.errors import Errors
from kvferry.testing.groups.fork import Fork
from kvferry.testing.groups.leaks import Leaks
from kvferry.testing.groups.many_peers import ManyPeers
from kvferry.testing.groups.memory import Memory
from kvferry.testing.groups.model import Model
from kvferry.testing.groups.peer_death import PeerDeath
from kvferry.testing.groups.proofs import Proofs
from kvferry.testing.groups.registration import Registration
from kvferry.testing.groups.scatter_gather import ScatterGather
from kvferry.testing.suite_base import FLOOD_BYTES, POOL_BYTES

__all__ = ["FLOOD_BYTES", "GROUPS", "POOL_BYTES", "EngineSuite"]

_MIXINS = (
    Registration,
    ScatterGather,
    ManyPeers,
    Proofs,
    PeerDeath,
    Blobs,
    Memory,
    Fork,
    Leaks,
    Errors,
    Model,
)

GROUPS = tuple(mixin.group for mixin in _MIXINS)
"""The groups' names, in the order of the matrix."""


class EngineSuite(Registration, ScatterGather, ManyPeers, Proofs, PeerDeath, Blobs, Memory, Fork, Leaks, Errors, Model):
    """All groups; subclasses set `engine_name`, `options` and `memory`, or override `make_engine`."""
