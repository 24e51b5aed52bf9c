"""A peer that speaks the control plane by hand: what it says, and as whom, is up to the test."""

import contextlib
import resource
import secrets
import socket
import struct
import threading
import time

import msgspec
import numpy as np
import zmq

from kvferry import KVPoll
from kvferry.engines.grants import GrantTable
from kvferry.engines.local import LocalEngine
from kvferry.engines.seam import EngineConfig
from kvferry.ids import PeerId
from kvferry.layout import bind
from kvferry.presets import page_major
from kvferry.wire import MAJOR, MINOR, Frame, Hello, KVArgsRegisterInfo, decode, encode

SENTINEL = 0xEE
HUGE = [-1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
THREADS = {"kvferry-control", "kvferry-mover"}


def toy_layout(**changes):
    """The layout of the sides in conftest, with changes."""
    facts = {"layers": 3, "kv_heads": 2, "head_dim": 8, "dtype": "float16", "pages": 32, "page_tokens": 16}
    return page_major(changes.pop("model", "toy"), **{**facts, **changes})


class RawPeer:
    """A DEALER socket, an identity, and a local engine that is never fed."""

    def __init__(self, endpoint, *, epoch=1, side="decode", layout=None):
        self.me = PeerId(secrets.randbits(62), epoch)
        self.other = None
        self.side = side
        layout = layout or toy_layout()
        self.pool = np.full(max(each.address + each.nbytes for each in layout.tensors), SENTINEL, np.uint8)
        self.layout = bind(layout, [(self.pool.ctypes.data, self.pool.nbytes)])
        self.engine = LocalEngine()
        self.engine.open(EngineConfig(self.me, GrantTable()))
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.connect(endpoint)

    def close(self):
        self.socket.close(0)
        self.context.term()
        self.engine.close()

    def registration(self, **changes):
        info = KVArgsRegisterInfo(
            self.layout,
            {"local": self.engine.personal(self.engine.describe(), self.me.epoch)},
            self.side,
            (32,),
            "by hand",
        )
        return msgspec.structs.replace(info, **changes)

    def say(self, message, *, source=None, destination=None):
        self.socket.send(encode(Frame(source or self.me, destination or self.other, message)))

    def hear(self, kind, timeout_s=2.0):
        """The next message of a kind; others are dropped."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.socket.poll(10):
                data = self.socket.recv()
                frame = decode(data) if data else None
                if frame is not None and isinstance(frame.message, kind):
                    self.other = frame.source
                    return frame.message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")

    def hello(self, version=(MAJOR, MINOR), peer=None):
        return Hello(version, peer or self.me)

    def shake(self, **changes):
        """Greet and register; returns what the other end registered, or its refusal by raising."""
        self.say(self.hello())
        self.say(self.registration(**changes))
        return self.hear(KVArgsRegisterInfo)


@contextlib.contextmanager
def raw_peer(endpoint, **more):
    peer = RawPeer(endpoint, **more)
    try:
        yield peer
    finally:
        peer.close()


def tcp_address(endpoint):
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def raw_tcp(endpoint, data, hold_s=0.0, *, reset=False):
    """Send bytes over plain TCP and hang up."""
    with socket.create_connection(tcp_address(endpoint), 2) as connection:
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        time.sleep(hold_s)


def works(prefill, decode, kit, room):
    """A normal room, byte for byte; and every thread lives."""
    prefill.fill([1, 2, 3], seed=room)
    receiver = kit.claim(decode, prefill, room, [room % 20 + 4, 2, 3], tag=room)
    sender = kit.offer(prefill, room, [1, 2, 3], tag=room)
    assert receiver.wait(5) is KVPoll.Success, receiver.failure()
    assert sender.wait(5) is KVPoll.Success
    assert (decode.pages([room % 20 + 4, 2, 3]) == prefill.pages([1, 2, 3])).all()
    assert prefill.manager.health() == decode.manager.health() == ""
    assert {thread.name for thread in threading.enumerate()} >= THREADS


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
