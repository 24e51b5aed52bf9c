import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # faulty_nixl is a module of its own

import faulty_nixl

from kvferry import KVArgs, KVClassType, KVReceiver, KVSender, get_kv_class
from kvferry.engines import find
from kvferry.node.view import TERMINAL, RoomView
from kvferry.presets import page_major

FAST = {
    "tick_s": 0.05, "heartbeat_s": 0.2, "heartbeat_timeout_s": 0.8, "bootstrap_timeout_s": 3.0,
    "claim_timeout_s": 3.0, "stall_s": 2.0, "drain_limit_s": 2.0,
}  # fmt: skip
SENTINEL = 0xEE
PAGES, PAGE_TOKENS = 32, 16

find.register("faulty", "kvferry.testing.faulty:FaultyEmbedded")
faulty_nixl.register()


class Side:
    """A manager with its pool and aux rows."""

    def __init__(self, mode, engine="local", layout=None, group=(), **more):
        self.layout = layout or page_major(
            "toy", layers=3, kv_heads=2, head_dim=8, dtype="float16", pages=PAGES, page_tokens=PAGE_TOKENS
        )
        size = max(tensor.address + tensor.nbytes for tensor in self.layout.tensors)
        self.pool = np.full(size, SENTINEL, np.uint8)
        self.aux = np.zeros((16, 4), np.int64)
        manager = get_kv_class(engine, KVClassType.MANAGER)
        args = KVArgs(self.layout, [self.pool], [self.aux], group)
        self.manager = manager(args, mode, environ={}, **{**FAST, **more})

    @property
    def engine(self):
        return self.manager.node.engine

    def pages(self, indices):
        return self.pool.reshape(PAGES, -1)[np.asarray(indices, int)]

    def fill(self, indices, seed):
        rows = np.random.default_rng(seed).integers(0, 255, (len(indices), self.pool.size // PAGES), np.uint8)
        self.pool.reshape(PAGES, -1)[np.asarray(indices, int)] = rows
        return rows


@pytest.fixture
def make():
    """make("prefill"), make("decode", engine="faulty", stall_s=1.0): sides that are shut down in the end."""
    sides, before = [], set(threading.enumerate())  # a test that failed may have left some

    def left():
        return [each.name for each in threading.enumerate() if each.name.startswith("kvferry") and each not in before]

    def build(mode, engine="local", layout=None, **more):
        sides.append(Side(mode, engine, layout, **more))
        return sides[-1]

    yield build
    for side in sides:
        if side.manager.node.engine_name.startswith("faulty"):
            side.engine.release()
        side.manager.shutdown()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and left():
        time.sleep(0.01)
    assert left() == []


@pytest.fixture
def pair(make):
    return make("prefill", "faulty"), make("decode", "faulty")


class Worker:
    """A side in a process of its own (worker_side.py); do("offer", room=1, pages=[2]) calls its methods."""

    def __init__(self, mode, engine="faulty", **more):
        command = [sys.executable, str(Path(__file__).parent / "worker_side.py"), mode, engine, json.dumps(more)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.manager = SimpleNamespace(endpoint=self._answer())

    def do(self, what, **arguments):
        self.process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def close(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()

    def _answer(self):
        assert select.select([self.process.stdout], [], [], 20)[0], "the worker does not answer"
        line = self.process.stdout.readline()
        assert line, f"the worker has ended: {self.process.wait()}"
        return json.loads(line)


@pytest.fixture
def spawn():
    """spawn("prefill", engine="faulty", stall_s=9.0): workers that are killed in the end."""
    workers = []

    def start(mode, engine="faulty", **more):
        workers.append(Worker(mode, engine, **more))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
def one_end_per_room(monkeypatch):
    """Records every state that every room takes; no room may end twice, or go on after its end."""
    seen = {}

    def record(view, value):
        seen.setdefault(view, []).append(value)

    monkeypatch.setattr(RoomView, "poll", property(lambda view: seen[view][-1], record), raising=False)
    yield
    for view, states in seen.items():
        ended = [state for state in states if state in TERMINAL]
        assert len(ended) <= 1, (view.room, states)
        assert not ended or states[-1] is ended[0], (view.room, states)


def offer(side, room, pages, *, aux_index=0, tag=0, num_tokens=None, send=True):
    sender = KVSender(side.manager, None, room)
    sender.init(len(pages), aux_index, num_tokens=num_tokens, tag=tag)
    if send:
        sender.send(np.array(pages, np.int32))
    return sender


def claim(side, peer, room, pages, *, aux_index=0, tag=0, num_tokens=None, prefix=0):
    peers = peer if isinstance(peer, list) else [peer]
    endpoints = [each if isinstance(each, str) else each.manager.endpoint for each in peers]
    receiver = KVReceiver(side.manager, None, room, peers=endpoints)
    receiver.init(tag=tag)
    receiver.send_metadata(np.array(pages, np.int32), aux_index, None, prefix, num_tokens=num_tokens)
    return receiver


def until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


@pytest.fixture
def kit():
    """The helpers of this file, for test modules (importlib mode has no imports between test files)."""
    return Kit


class Kit:
    SENTINEL, PAGES, PAGE_TOKENS, FAST = SENTINEL, PAGES, PAGE_TOKENS, FAST
    offer, claim, until = staticmethod(offer), staticmethod(claim), staticmethod(until)
