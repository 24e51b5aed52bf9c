"""The demo's worker processes: `python -m kvferry.serve.worker prefill|decode`.

A worker says "ready", reads one request as a line of JSON, and reports what it does as events on standard output.
The prefill worker computes the prompt and hands the pages over; afterwards it decodes from its own pages, as the
single process that the decode worker is compared with. The decode worker never sees the prompt.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

from kvferry.api import KVArgs, KVClassType, KVManager, KVPoll, KVReceiver, KVSender, get_kv_class
from kvferry.errors import ConfigError, KvferryError
from kvferry.ids import Side
from kvferry.obs import EventWriter
from kvferry.presets import page_major
from kvferry.serve.cache import PagedCache
from kvferry.serve.generate import LogitsHash, blas_fingerprint, greedy, prefill, require_worker_env
from kvferry.serve.model import Model
from kvferry.serve.weights import find_model, load

PAGE_TOKENS = 16
AUX_INDEX = 0
WAIT_S = 120.0


class Start(msgspec.Struct, frozen=True):
    """How a worker is set up: its first line of standard input.

    Attributes:
        model: path of a GGUF file; None is the packaged model.
        engine: name of the transfer engine.
        bootstrap: "host:port" of the bootstrap server.
        max_tokens: room for this many tokens of one request.
        seed: decides the order in which pages are handed out.
    """

    model: str | None
    engine: str
    bootstrap: str
    max_tokens: int
    seed: int


class Request(msgspec.Struct, frozen=True):
    """One request: the second line. `tokens` is only said to the prefill worker."""

    room: int
    tag: int
    num_tokens: int
    max_new_tokens: int
    tokens: list[int] = []


class Worker:
    """What both workers have: a model, a paged cache in registered memory, a manager."""

    def __init__(self, side: Side, start: Start, events: EventWriter) -> None:
        self.events = events
        events.write("stage", text="loading the model")
        weights = load(find_model(start.model))
        self.model = Model(weights)
        shape = weights.config
        pages = -(-start.max_tokens // PAGE_TOKENS) + 8
        self.cache = PagedCache(
            range(shape.layers), range(shape.kv_heads), shape.head_dim, pages, page_tokens=PAGE_TOKENS, seed=start.seed
        )
        self.eos = shape.eos_ids
        self.aux = np.zeros((4, 8), np.int64)
        layout = page_major(
            find_model(start.model).name, layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            dtype="float16", pages=pages, page_tokens=PAGE_TOKENS,
        )  # fmt: skip
        args = KVArgs(layout, [(self.cache.address, self.cache.nbytes)], [self.aux])
        manager = get_kv_class(start.engine, KVClassType.MANAGER)
        self.manager: KVManager = manager(args, side, bootstrap_addr=start.bootstrap)
        self.bootstrap = start.bootstrap
        events.write("ready", arithmetic=blas_fingerprint(), engine=self.manager.info()["engine_info"])

    def decode(self, pages: np.ndarray, first_token: int, request: Request) -> None:
        """Generate from what is in the cache; each token is an event, the logits go into the result."""
        seen = LogitsHash()
        tokens = [first_token]
        self.events.write("token", token=first_token)
        for token, logits in greedy(
            self.model, self.cache, pages, first_token, request.num_tokens, request.max_new_tokens - 1, self.eos
        ):
            seen.update(logits)
            tokens.append(token)
            self.events.write("token", token=token)
        self.events.write("generated", tokens=tokens, logits=seen.hexdigest())

    def digests(self, pages: np.ndarray, num_tokens: int) -> None:
        """Say what the cache holds of the request, per layer, logical page and KV head."""
        found = self.cache.digests(pages, num_tokens)
        self.events.write("digests", digests={"/".join(map(str, key)): value.hex() for key, value in found.items()})

    def allocate(self, request: Request) -> tuple[np.ndarray, int]:
        """Pages for prompt and answer, and how many of them the prompt fills."""
        total = request.num_tokens + request.max_new_tokens
        return self.cache.allocate(-(-total // PAGE_TOKENS)), -(-request.num_tokens // PAGE_TOKENS)


def run_prefill(worker: Worker, request: Request) -> None:
    """Compute, hand over, then decode from the same bytes."""
    events = worker.events
    sender = KVSender(worker.manager, worker.bootstrap, request.room)
    pages, filled = worker.allocate(request)
    sender.init(filled, AUX_INDEX, num_tokens=request.num_tokens, tag=request.tag)
    events.write("stage", text=f"computing {request.num_tokens} tokens")
    first_token, _ = prefill(worker.model, worker.cache, pages, request.tokens)
    worker.aux[AUX_INDEX, :2] = (request.room, first_token)
    events.write("stage", text="handing the pages over")
    sent = events.write("sent")
    sender.send(pages[:filled])
    if sender.wait(WAIT_S) is not KVPoll.Success:
        sender.failure_exception()
    metric = sender.get_transfer_metric()
    events.write(
        "handed over", sent_s=sent.at_s, kv_bytes=metric.transfer_total_bytes, **_memcpy(worker, pages[:filled])
    )
    worker.digests(pages, request.num_tokens)
    worker.decode(pages, first_token, request)


def run_decode(worker: Worker, request: Request) -> None:
    """Receive, then generate without having seen the prompt."""
    events = worker.events
    receiver = KVReceiver(worker.manager, worker.bootstrap, request.room)
    receiver.init(0, tag=request.tag)
    pages, filled = worker.allocate(request)
    receiver.send_metadata(pages[:filled], AUX_INDEX, num_tokens=request.num_tokens)
    events.write("stage", text="waiting for the pages")
    if receiver.wait(WAIT_S) is not KVPoll.Success:
        receiver.failure_exception()
    events.write("received", kv_bytes=receiver.get_transfer_metric().transfer_total_bytes)
    room, first_token = (int(value) for value in worker.aux[AUX_INDEX, :2])
    if room != request.room:
        raise ConfigError(f"the metadata row is of room {room}, not of {request.room}")
    events.write("stage", text="generating")
    worker.digests(pages, request.num_tokens)
    worker.decode(pages, first_token, request)


def _memcpy(worker: Worker, pages: np.ndarray) -> dict[str, float]:
    """Seconds that one memcpy of as many bytes takes here: median of nine, between touched buffers."""
    source = np.ascontiguousarray(worker.cache.block[pages])
    target = np.empty_like(source)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return {"memcpy_s": sorted(seconds[1:])[4]}


RUNS: dict[Side, Callable[[Worker, Request], None]] = {Side.PREFILL: run_prefill, Side.DECODE: run_decode}


def main(arguments: list[str]) -> int:
    """Run a worker until its request is answered or its standard input ends."""
    side = Side(arguments[0])
    events = EventWriter(side.value, sys.stdout)
    worker: Worker | None = None

    def leave(*_: object) -> None:
        """By way of the manager's shutdown, if there is a manager: else an exception could come up anywhere."""
        if worker is None:
            os._exit(128 + signal.SIGTERM)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        require_worker_env()
        worker = Worker(side, msgspec.json.decode(sys.stdin.readline(), type=Start), events)
        line = sys.stdin.readline()
        if line.strip():
            RUNS[side](worker, msgspec.json.decode(line, type=Request))
            sys.stdin.readline()  # stay until the other side has read everything, and the parent says so
    except KvferryError as error:
        events.write("error", text=str(error), input=isinstance(error, ConfigError))
        return 2
    except BrokenPipeError:  # whoever started this worker is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the shutdown is not interrupted half way
        if worker is not None:
            worker.manager.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
