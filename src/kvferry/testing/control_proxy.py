"""A proxy for one prefill rank's control plane, which loses, delays and repeats messages, or cuts connections.

It speaks ZMQ on both sides: a decode rank dials it instead of the prefill rank, and is known there by its own name.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable

import zmq

_STEP_MS = 5


class ControlProxy:
    """Runs from its construction until `close`. Settings may be changed at any time, from any thread.

    Attributes:
        endpoint: "tcp://127.0.0.1:port": what decode ranks dial.
        drop: share of the messages that are lost, 0 to 1.
        duplicate: share of the messages that come twice.
        delay_s: each message waits so long, or less: later ones may overtake it.
        holding: nothing passes; what comes meanwhile waits.
        passed, lost: messages so far.
    """

    def __init__(self, target: str, seed: int = 1) -> None:
        """Begin.

        Args:
            target: "tcp://host:port" of the prefill rank.
            seed: decides which messages are lost, delayed, repeated.
        """
        self.drop, self.duplicate, self.delay_s, self.holding = 0.0, 0.0, 0.0, False
        self.passed = self.lost = 0
        self._target, self._random = target, random.Random(seed)  # noqa: S311 - no secrets
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._clients: dict[bytes, zmq.Socket[bytes]] = {}
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._cut_asked, self._cut_done, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._front = self._bind("tcp://127.0.0.1:*")
        self.endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="control-proxy", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Close all connections, on both sides; new ones are welcome."""
        self._cut_done.clear()
        self._cut_asked.set()
        assert self._cut_done.wait(5), "the proxy does not run"

    def close(self) -> None:
        """End it and its connections. May be called twice."""
        self._ended.set()
        self._thread.join(5)

    # -- the thread

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._cut_asked.is_set():
                self._cut()
            for socket, name in self._ready():
                self._take(socket, name)
            while self._waiting and self._waiting[0][0] <= time.monotonic() and not self.holding:
                heapq.heappop(self._waiting)[2]()
        self._close_clients()
        self._front.close(0)
        self._context.term()

    def _ready(self) -> list[tuple[zmq.Socket[bytes], bytes]]:
        poller = zmq.Poller()
        names = {self._front: b"", **{socket: name for name, socket in self._clients.items()}}
        for socket in names:
            poller.register(socket, zmq.POLLIN)
        return [(socket, names[socket]) for socket, _ in poller.poll(_STEP_MS)]

    def _take(self, socket: zmq.Socket[bytes], name: bytes) -> None:
        """One message, from a client if it has no name yet, else from the target for the client of that name."""
        parts = socket.recv_multipart()
        if name:
            self._pass_on(lambda: self._to_client(name, parts))
        else:
            name, parts = parts[0], parts[1:]
            if name not in self._clients:
                self._clients[name] = self._dial(name)
            self._pass_on(lambda: self._to_target(name, parts))

    def _pass_on(self, send: Callable[[], None]) -> None:
        if self._random.random() < self.drop:
            self.lost += 1
            return
        for _ in range(2 if self._random.random() < self.duplicate else 1):
            due_s = time.monotonic() + self._random.random() * self.delay_s
            heapq.heappush(self._waiting, (due_s, next(self._numbers), send))
        self.passed += 1

    def _to_client(self, name: bytes, parts: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it has gone
            self._front.send_multipart([name, *parts], zmq.NOBLOCK)

    def _to_target(self, name: bytes, parts: list[bytes]) -> None:
        if name in self._clients:
            with contextlib.suppress(zmq.ZMQError):
                self._clients[name].send_multipart(parts, zmq.NOBLOCK)

    def _cut(self) -> None:
        self._cut_asked.clear()
        self._close_clients()
        self._waiting.clear()
        self._front.close(0)
        deadline = time.monotonic() + 5
        while True:
            try:
                self._front = self._bind(self.endpoint)
                break
            except zmq.ZMQError:  # its own old socket is being closed by libzmq's thread
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        self._cut_done.set()

    def _close_clients(self) -> None:
        for socket in self._clients.values():
            socket.close(0)
        self._clients.clear()

    def _bind(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError:
            socket.close(0)
            raise
        return socket

    def _dial(self, name: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, name)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(self._target)
        return socket
