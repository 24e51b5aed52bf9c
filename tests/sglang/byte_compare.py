"""Compares what decode ranks hold with what prefill ranks held, element by element, from the servers' records."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from models import MODELS, WINDOW_TOKENS

if TYPE_CHECKING:
    from client import Exchange
    from servers import Pair

RECORD_LIMIT_S = 10.0
MAIN = "kv"
Key = tuple[str, int, str, int, int]
"""Space, layer, field, head, position."""


@dataclass(frozen=True)
class Record:
    """What one rank held of one request.

    Attributes:
        rank: place in the grid.
        pool: the pool in which it held that, "device" or "host".
        prefix_tokens: where decode's part begins, as this side was told.
        digests: element -> digest.
    """

    rank: str
    pool: str
    prefix_tokens: int
    digests: dict[Key, int]


def read(path: Path) -> Record:
    """Read a record."""
    found: dict[str, Any] = msgspec.msgpack.decode(path.read_bytes())
    digests = {(space, layer, field, head, at): digest for space, layer, field, head, at, digest in found["elements"]}
    return Record(f"{found['side']} {found['rank']}", found["pool"], found["prefix_tokens"], digests)


def wait_for_records(pair: Pair, room: int, side: str) -> list[Record]:
    """Those of all ranks of a side: the last one may be written after the client has its answer."""
    deadline, wanted = time.monotonic() + RECORD_LIMIT_S, pair.ranks(side)
    while len(paths := sorted(pair.records.glob(f"{room}.{side}.*.record"))) < wanted:
        assert time.monotonic() < deadline, f"room {room}: {len(paths)} of {wanted} ranks of {side} have ended it"
        time.sleep(0.01)
    assert len(paths) == wanted
    return [read(path) for path in paths]


def differences(pair: Pair, exchange: Exchange) -> list[str]:
    """What is wrong with the bytes of one request, in words; nothing if every element of decode is prefill's."""
    prefill = wait_for_records(pair, exchange.room, "prefill")
    decode = wait_for_records(pair, exchange.room, "decode")
    there: dict[Key, tuple[int, str]] = {}
    wrong = []
    for record in prefill:
        for key, digest in record.digests.items():
            other, rank = there.setdefault(key, (digest, record.rank))
            if other != digest and _is_token(key, exchange):
                wrong.append(f"{key} differs between {rank} and {record.rank}")
    for record in decode:
        for key, digest in record.digests.items():
            if _is_token(key, exchange) and there.get(key, (None,))[0] != digest:
                wrong.append(f"{key} on {record.rank} is not prefill's")
    return wrong + _gaps(pair, exchange, decode)


def _is_token(key: Key, exchange: Exchange) -> bool:
    """What lies in the last page behind the request's last token is nobody's."""
    return key[0] != MAIN or key[4] < exchange.prompt_tokens


def _gaps(pair: Pair, exchange: Exchange, decode: list[Record]) -> list[str]:
    """Elements of the model that decode should hold and does not."""
    model, prefix = MODELS[pair.setup.model], decode[0].prefix_tokens
    held: dict[tuple[str, int, str, int], set[int]] = defaultdict(set)
    for record in decode:
        for key in record.digests:
            if _is_token(key, exchange):
                held[key[:4]].add(key[4])
    tokens = set(range(prefix, exchange.prompt_tokens))
    full = {row for row in held if row[0] == MAIN}
    wrong = [f"{row}: decode holds {len(held[row])} tokens of {len(tokens)}" for row in full if held[row] != tokens]
    if tokens and len(full) != model.rows:
        wrong.append(f"decode holds {len(full)} rows of the KV cache, the model has {model.rows}")
    windows = set(held) - full
    if len(windows) != model.window_rows:
        wrong.append(f"decode holds {len(windows)} rows of windows, the model has {model.window_rows}")
    least = min(WINDOW_TOKENS - 1, exchange.prompt_tokens)  # the next token itself is one of its window
    return wrong + [f"{row}: a window of {len(held[row])} tokens" for row in windows if len(held[row]) < least]
