"""For libraries whose calls wait and whose failures spread: a thread and an instance of the library for each peer.

`PeerEngine` is the engine, `PeerThread` what writes to one peer, `Served` what peers write to. An engine of such a
library derives from all three and adds what is the library's own: see `engines.mooncake` and `engines.mori`.
"""

from kvferry.engines.per_peer.engine import PeerEngine
from kvferry.engines.per_peer.served import MAIN, Served
from kvferry.engines.per_peer.thread import Attaching, PeerThread, Writing

__all__ = ["MAIN", "Attaching", "PeerEngine", "PeerThread", "Served", "Writing"]
