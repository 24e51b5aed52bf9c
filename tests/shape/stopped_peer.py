"""A peer in a process of its own that can be stopped (SIGSTOP), and the calls that a scheduler makes meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

import numpy as np
import numpy.typing as npt
from pools import make_pool
from ranks import SETTINGS

from kvferry import KVManager, KVPoll, KVReceiver, KVSender

ALIVE = SETTINGS | {
    "claim_timeout_s": 30.0,
    "bootstrap_timeout_s": 30.0,
    "heartbeat_s": 1.0,
    "heartbeat_timeout_s": 5.0,
}
"""A peer that was just stopped still counts as alive: calls could wait for it."""

CLAIMS_FROM, OFFERS_FROM = 0, 10_000
"""First rooms of those that the peer claims, and of those that it offers."""


class StoppablePeer:
    """Rooms in both directions between this process and another one, up to the point where both have met."""

    def __init__(self, count: int) -> None:
        self.count = count
        pages = 2 * count + 2
        self.prefill = KVManager(make_pool("page_major", 0, 1, pages).args(), "prefill", environ={}, **ALIVE)
        self.decode = KVManager(make_pool("page_major", 0, 1, pages).args(), "decode", environ={}, **ALIVE)
        command = [sys.executable, __file__, self.prefill.endpoint, str(count)]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ)
        self.senders: list[KVSender] = []
        self.receivers: list[KVReceiver] = []

    def meet(self) -> None:
        """Until the peer's receivers wait for our pages, and our receivers may name theirs."""
        peers = [_pipe(self.process.stdout).readline().strip()]
        self.senders = [KVSender(self.prefill, None, CLAIMS_FROM + i) for i in range(self.count)]
        self.receivers = [KVReceiver(self.decode, None, OFFERS_FROM + i, peers=peers) for i in range(self.count)]
        for receiver in self.receivers:
            receiver.init(0)
        deadline = time.monotonic() + 20
        while any(room.poll() is not KVPoll.WaitingForInput for room in (*self.senders, *self.receivers)):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def timed_calls(self, index: int) -> list[float]:
        """Seconds of each call that a pair of schedulers makes for two rooms that end in an abort."""
        sender, receiver = self.senders[index], self.receivers[index]
        pages, calls = _pages(index), list[Callable[[], object]]()
        calls += [lambda: sender.init(2, 0), lambda: sender.send(pages), sender.poll]
        calls += [lambda: receiver.send_metadata(pages, 0), receiver.poll]
        calls += [sender.abort, receiver.abort, sender.is_release_safe, sender.clear, receiver.clear]
        return [_seconds(call) for call in calls]

    def __enter__(self) -> StoppablePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            _pipe(pipe).close()
        self.process.wait(10)
        self.prefill.shutdown()
        self.decode.shutdown()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _pages(index: int) -> npt.NDArray[np.int32]:
    return np.array([2 * index, 2 * index + 1], np.int32)


def serve(endpoint: str, count: int) -> None:
    """The other process: claim and offer rooms, then stay until the pipe is closed."""
    with (
        KVManager(make_pool("page_major", 0, 1, 2 * count + 2).args(), "prefill", environ={}, **ALIVE) as prefill,
        KVManager(make_pool("page_major", 0, 1, 2 * count + 2).args(), "decode", environ={}, **ALIVE) as decode,
    ):
        rooms = [KVSender(prefill, None, OFFERS_FROM + i) for i in range(count)]
        for i in range(count):
            receiver = KVReceiver(decode, None, CLAIMS_FROM + i, peers=[endpoint])
            receiver.init(0)
            receiver.send_metadata(_pages(i))
        print(prefill.endpoint, flush=True)
        sys.stdin.read()
        del rooms


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
