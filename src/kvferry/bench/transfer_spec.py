"""What `kvferry bench transfer` is told, checked; and what both processes derive from it: layout, pages, rows."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry import config as settings
from kvferry.api import KVClassType, get_kv_class
from kvferry.bench import bare
from kvferry.bench.habits import WAITS
from kvferry.bench.model_case import ModelCase
from kvferry.config import DIGESTS, Config
from kvferry.engines import find
from kvferry.errors import InputError
from kvferry.free_memory import free_memory
from kvferry.layout import Layout
from kvferry.presets import layer_major, page_major

ORDERS = ("contig", "shuffle", "reverse")
POOLS = ("private", "memfd")
LAYOUTS = ("page", "layer")
PAGE_TOKENS = 16
ROW_BYTES = 2 * PAGE_TOKENS
"""K and V of 16 tokens: a page is a multiple of it."""


class TransferSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement; the fields are the options of the command.

    Attributes:
        engine: name of the transfer engine.
        mechanism: option "mechanism" of the engine; None leaves it to the engine.
        layers: layers of the model; it, `pages`, `page_bytes` and `layout` count only without `case`.
        pages: pages of the request, or of all requests in flight together.
        page_bytes: bytes of one page of one layer, K and V together.
        order: which pages on the two sides; see `source_pages` and `target_pages`.
        inflight: requests at once; each has its share of the pages.
        repeats: measured rounds.
        warmup: rounds before them.
        pool: how the pools are allocated.
        digests: values of the setting `digest` that are measured, in turns.
        layout: "page": a page of all layers is one run; "layer": one tensor for K and one for V of each layer.
        wait: how the decode side waits.
        forward_ms: how long both sides do nothing between naming pages and sending.
        seed: decides the shuffled order.
        case: a model's request between two grids; None where pages of a fixed size are moved between two ranks.
        bare: whether the engine's library is driven bare beside; None where it can be.
    """

    engine: str = "local"
    mechanism: str | None = None
    layers: int = 1
    pages: int = 2048
    page_bytes: int = 65536
    order: str = "shuffle"
    inflight: int = 1
    repeats: int = 30
    warmup: int = 2
    pool: str = "private"
    digests: tuple[str, ...] = ("sample",)
    layout: str = "page"
    wait: str = "yield"
    forward_ms: int = 20
    seed: int = 1
    case: ModelCase | None = None
    bare: bool | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that travel in one round."""
        if self.case is not None:
            return self.case.nbytes
        return self.layers * self.pages * self.page_bytes

    @property
    def guards(self) -> int:
        """Pages of each pool that belong to no request."""
        return max(2, self.pages // 16)

    @property
    def pool_pages(self) -> int:
        """Pages of each pool."""
        return self.pages + self.guards

    @property
    def pool_bytes(self) -> int:
        """Bytes of each pool."""
        return self.layers * self.pool_pages * self.page_bytes

    @property
    def round_limit_s(self) -> float:
        """Longest time for one step of a round: 50 MB/s is slower than anything that works."""
        return 60 + self.nbytes / 50e6


def check(spec: TransferSpec) -> None:
    """Refuse what can't be measured, before a process is started.

    Raises:
        ConfigError: what is wrong, with the option's name, and what is possible.
        EngineUnavailable: the engine can't be used here.
    """
    counts = {"layers": spec.layers, "pages": spec.pages, "page-bytes": spec.page_bytes, "inflight": spec.inflight,
              "repeats": spec.repeats}  # fmt: skip
    for name, count in counts.items():
        at_least(name, count, 1)
    at_least("seed", spec.seed, 0)
    at_least("forward-ms", spec.forward_ms, 0)
    chosen(("order", spec.order, ORDERS), ("pool", spec.pool, POOLS), ("layout", spec.layout, LAYOUTS))
    chosen(("wait", spec.wait, WAITS), *(("digest", digest, DIGESTS) for digest in spec.digests))
    if spec.case is None:
        _check_fixed(spec)
    check_engine(spec.engine, spec.mechanism)
    bare.check(spec.engine, spec.bare)
    for digest in spec.digests:
        settings_of(spec.mechanism, digest)


def _check_fixed(spec: TransferSpec) -> None:
    if spec.page_bytes % ROW_BYTES:
        raise InputError(
            f"--page-bytes {spec.page_bytes} is not a multiple of {ROW_BYTES}",
            hint=f"a page holds K and V of {PAGE_TOKENS} tokens",
        )
    if spec.inflight > spec.pages:
        raise InputError(
            f"--inflight {spec.inflight} is above --pages {spec.pages}", hint="each request needs at least one page"
        )
    check_memory(3 * spec.pool_bytes, "--layers, --pages or --page-bytes")


def at_least(name: str, value: int, least: int) -> None:
    """Refuse a smaller number. Raises InputError."""
    if value < least:
        raise InputError(f"--{name} {value} is below {least}")


def chosen(*options: tuple[str, str, tuple[str, ...]]) -> None:
    """Refuse an unknown word for any of the options (name, value, known words). Raises InputError."""
    for name, value, known in options:
        if value not in known:
            raise InputError(f"--{name} {value!r} is not known", hint=f"one of {', '.join(known)}")


def check_memory(nbytes: int, options: str) -> None:
    """Refuse pools that do not fit: they are touched, all of them. Raises InputError, which says what to lower."""
    free = free_memory()
    if free is not None and nbytes > free.nbytes - free.nbytes // 10:
        raise InputError(
            f"the pools of both processes need {nbytes} bytes; {free.where} has {free.nbytes} free, a tenth is left",
            hint=f"lower {options}",
        )


def check_engine(engine: str, mechanism: str | None) -> None:
    """Refuse an engine that is not known or not usable, or an empty mechanism. Raises ConfigError and its like."""
    name = find.canonical(engine)
    get_kv_class(name, KVClassType.MANAGER)
    find.load(name)
    if mechanism is not None and (not mechanism.strip() or set(mechanism) & {",", "="}):
        raise InputError(f"--mechanism {mechanism!r} is no word", hint="the local engine knows auto, shm, cma and tcp")


def manager_settings(mechanism: str | None, digest: str) -> dict[str, Any]:
    """Settings of a manager by name, beside those that the environment gives; `settings_of` says what comes of them.

    Raises:
        ConfigError: a setting is unknown, or has a value that isn't.
    """
    found: dict[str, Any] = {"digest": digest}
    if mechanism is not None:
        options = settings.load(os.environ).options() | {"mechanism": mechanism}
        found["engine_options"] = ",".join(f"{name}={value}" for name, value in options.items())
    return found


def settings_of(mechanism: str | None, digest: str) -> Config:
    """What a manager's settings will be. Raises ConfigError."""
    return settings.load(os.environ, **manager_settings(mechanism, digest))


def layout_of(spec: TransferSpec) -> Layout:
    """The layout of both pools: one KV head, 16 tokens a page, one byte an element."""
    make = page_major if spec.layout == "page" else layer_major
    return make(
        "bench", layers=spec.layers, kv_heads=1, head_dim=spec.page_bytes // ROW_BYTES, dtype="uint8",
        pages=spec.pool_pages, page_tokens=PAGE_TOKENS,
    )  # fmt: skip


def rows_of(spec: TransferSpec, pool: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The pool as uint64[tensors, pool_pages, words]: how its bytes belong to pages in this layout."""
    tensors = 1 if spec.layout == "page" else 2 * spec.layers
    return pool[: spec.pool_bytes].view(np.uint64).reshape(tensors, spec.pool_pages, -1)


def source_pages(spec: TransferSpec) -> npt.NDArray[np.int32]:
    """int32[pages]: where the requests lie in the prefill pool; in one run unless the order is "shuffle"."""
    return _pages(spec, 0)


def target_pages(spec: TransferSpec) -> npt.NDArray[np.int32]:
    """int32[pages]: where they go in the decode pool; "reverse" is one run backwards."""
    pages = _pages(spec, 1)
    return pages[::-1].copy() if spec.order == "reverse" else pages


def shares(spec: TransferSpec, pages: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
    """The pages of each request in flight."""
    return np.array_split(pages, spec.inflight)


def _pages(spec: TransferSpec, side: int) -> npt.NDArray[np.int32]:
    if spec.order == "shuffle":
        mixed = np.random.default_rng((spec.seed, side)).permutation(spec.pool_pages)
        return mixed[: spec.pages].astype(np.int32)
    first = spec.guards // 2
    return np.arange(first, first + spec.pages, dtype=np.int32)
