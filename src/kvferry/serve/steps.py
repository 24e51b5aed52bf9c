"""How a request goes through the ranks of both sides.

Every rank of the prefill side computes the whole model, with the same shapes, in a cache of its own, and stores its
share in the registered pool: so the bytes don't depend on the grid, as they would if ranks added up partial sums.
What the pools of a side hold is put together in its logical cache. Every decode rank compares its pool with that of the
prefill side; the first rank of each side generates from its own side's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.api import KVReceiver, KVSender
from kvferry.errors import KvferryError
from kvferry.ids import Side
from kvferry.serve.cache import PagedCache, Pages
from kvferry.serve.cache_file import CacheFile
from kvferry.serve.generate import LogitsHash, greedy, prefill
from kvferry.serve.rank import FILLS, RankWorker, Request
from kvferry.serve.share import Logical

AUX_INDEX = 0


class WrongContent(KvferryError):
    """What was handed over is not whole, or not this request's."""

    code = "demo"


def run_prefill(worker: RankWorker, request: Request) -> None:
    """Compute, hand the share over; the first rank then generates from what all prefill pools hold."""
    sender = KVSender(worker.manager, worker.start.bootstrap, request.room)
    sender.init(len(worker.pages), AUX_INDEX, num_tokens=request.num_tokens, tag=request.tag)
    first_token = _compute(worker, request)
    worker.aux[AUX_INDEX, :2] = (request.room, first_token)
    worker.events.write("computed", first_token=first_token)
    worker.wait_for_go()
    worker.stage("handing the pages over")
    sent = worker.events.write("sent")
    sender.send(worker.pages)
    kv_bytes = worker.wait_for(sender)
    worker.events.write("handed over", sent_s=sent.at_s, kv_bytes=kv_bytes)
    _put_together(worker, worker.handed)
    worker.wait_for_go()
    if worker.leads:
        whose = "its own" if worker.is_alone else "all prefill ranks'"
        worker.stage(f"decoding from {whose} pages, to compare")
        worker.events.write("memcpy", **_memcpy(worker.handed.values))
        _generate(worker, worker.handed, first_token, request)


def run_decode(worker: RankWorker, request: Request) -> None:
    """Receive the share and compare it; the first rank then generates without having seen the prompt."""
    receiver = KVReceiver(worker.manager, worker.start.bootstrap, request.room)
    receiver.init(0, tag=request.tag)
    receiver.send_metadata(worker.pages, AUX_INDEX, num_tokens=request.num_tokens)
    worker.stage("waiting for the pages")
    kv_bytes = worker.wait_for(receiver)
    room, first_token = (int(value) for value in worker.aux[AUX_INDEX, :2])
    worker.events.write("received", kv_bytes=kv_bytes, first_token=first_token)
    if room != request.room:
        raise WrongContent(f"the metadata row is of room {room}, not of {request.room}")
    _put_together(worker, worker.landed)
    worker.wait_for_go()
    difference = worker.share.compare(worker.handed.values)
    worker.events.write("compared", nbytes=worker.share.nbytes, difference=_words(difference))
    if worker.leads:
        worker.stage("generating")
        _generate(worker, worker.landed, first_token, request)


RUNS: dict[Side, Callable[[RankWorker, Request], None]] = {Side.PREFILL: run_prefill, Side.DECODE: run_decode}


def _compute(worker: RankWorker, request: Request) -> int:
    """Compute the prompt in a cache of the whole model, keep the rank's share; returns the first token."""
    worker.stage(f"computing {request.num_tokens} tokens")
    cache, pages = _whole_cache(worker)
    first_token, _ = prefill(worker.model, cache, pages, request.tokens)
    worker.share.store(cache.read(pages, request.num_tokens))
    return first_token


def _put_together(worker: RankWorker, file: CacheFile) -> None:
    """Put what the pool holds into the side's logical cache, and look at what else is in the pool."""
    stray = worker.share.stray_bytes(FILLS[worker.side])
    with file.locked() as values:
        clash = worker.share.merge(values)
    differences = [f"two ranks of this side differ in {clash}"] if clash else []
    differences += [f"{stray} bytes were written outside of the request's tokens"] if stray else []
    worker.events.write("stored", difference="; ".join(differences))


def _generate(worker: RankWorker, file: CacheFile, first_token: int, request: Request) -> None:
    """Generate from a side's logical cache; each token is an event, the logits go into the result."""
    missing = file.missing()
    if missing:
        raise WrongContent(f"no rank of this side holds {missing}")
    cache, pages = _whole_cache(worker)
    cache.fill(pages, file.values)
    seen, tokens = LogitsHash(), [first_token]
    worker.events.write("token", token=first_token)
    position, more, eos = request.num_tokens, request.max_new_tokens - 1, worker.model.config.eos_ids
    for token, logits in greedy(worker.model, cache, pages, first_token, position, more, eos):
        seen.update(logits)
        tokens.append(token)
        worker.events.write("token", token=token)
    worker.events.write("generated", tokens=tokens, logits=seen.hexdigest())


def _whole_cache(worker: RankWorker) -> tuple[PagedCache, Pages]:
    """A cache of all layers and heads, in memory of this process alone, and its pages."""
    config = worker.model.config
    count = -(-worker.start.max_tokens // 16)
    cache = PagedCache(range(config.layers), range(config.kv_heads), config.head_dim, count, seed=worker.start.seed)
    return cache, cache.allocate(count)


def _memcpy(values: Logical) -> dict[str, Any]:
    """Seconds that one memcpy of the whole cache takes here: median of nine, between touched buffers."""
    source = np.array(values)
    target = np.empty_like(source)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": sorted(seconds[1:])[4], "nbytes": source.nbytes}


def _words(difference: object) -> str:
    return "" if difference is None else str(difference)
