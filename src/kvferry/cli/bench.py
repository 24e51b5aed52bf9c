"""`kvferry bench`: options of the measurements, and what is shown of them."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console, Group
from rich.table import Table

from kvferry import config as settings
from kvferry.bench import model_case
from kvferry.bench import plan as plan_bench
from kvferry.bench import rooms as rooms_bench
from kvferry.bench import transfer as transfer_bench
from kvferry.bench.plan import PlanReport, PlanSpec
from kvferry.bench.rooms import RoomsReport
from kvferry.bench.rooms_spec import HABITS, RoomsSpec
from kvferry.bench.transfer_report import TransferReport
from kvferry.bench.transfer_spec import TransferSpec, at_least
from kvferry.cli.bench_tables import plan_table, rooms_table, transfer_table
from kvferry.errors import InputError

app = cyclopts.App(
    name="bench", help="Measure kvferry on this machine: between real processes, with every byte checked."
)

Engine = Annotated[str, Parameter(env_var="KVFERRY_ENGINE")]
Flag = Annotated[bool, Parameter(negative=())]


@app.command
def transfer(
    *, engine: Engine = "local", mechanism: str | None = None, model: str | None = None, tokens: int | None = None,
    prefill: str | None = None, decode: str | None = None, layers: int | None = None, pages: int | None = None,
    page_bytes: int | None = None, order: str = "shuffle", inflight: int = 1, repeats: int | None = None,
    pool: str = "private", digest: str | None = None, compare_digest: Flag = False, layout: str | None = None,
    wait: str = "yield", forward_ms: int = 20, bare: bool | None = None, seed: int = 1, quick: Flag = False,
    json: Flag = False,
) -> int:  # fmt: skip
    """Measure large hand-overs between two processes, from send() until the decode side's scheduler sees Success.

    What moves is either pages of one size between two ranks, or with --model a request of a known model between two
    grids; then each process holds all ranks of its side. A memcpy of the same bytes, for TCP a plain loopback stream,
    and the engine's own library driven bare are measured in turns with the transfers. Every byte of every round is
    compared outside of the measured time; exits with 1 if one differs.

    Args:
        engine: The transfer engine.
        mechanism: Option "mechanism" of the engine; the local engine knows auto, shm, cma and tcp.
        model: A model by name, e.g. llama-3.1-8b; an unknown name lists those that are known. Where memory is short
            fewer tokens are moved, then fewer layers, and the report says so.
        tokens: With --model: tokens of each request. 4096, with --quick 256.
        prefill: With --model: the grid of the prefill side, e.g. "tp=4,page=16"; see "kvferry explain".
        decode: With --model: the grid of the decode side.
        layers: Without --model: layers. 1.
        pages: Without --model: pages of the request; with --inflight, of all requests together. 2048, with --quick 128.
        page_bytes: Without --model: bytes of one page of one layer, K and V together. 65536.
        order: Where the pages lie: contig (one run on both sides), shuffle, or reverse (one run, filled backwards).
        inflight: Requests at once, each with its share of the pages; with --model each of so many tokens.
        repeats: Measured rounds. 30, with --quick 3.
        pool: How the pools are allocated: private (huge pages if there are any) or memfd.
        digest: The setting "digest": off, sample or full; by default as it is set.
        compare_digest: Measure the digests off, sample and full in turns.
        layout: Without --model: page (a page of all layers is one run) or layer (one tensor for K and one for V of each
            layer). page.
        wait: How the decode side waits: wait, yield (sched_yield between polls), nap (200 us) or busy (300 us Python).
        forward_ms: Milliseconds of rest between naming pages and sending them: the forward pass. 0: busy, warm caches.
        bare: Drive the engine's own library without kvferry in turns with it; by default with nixl and mooncake.
        seed: Decides the shuffled order.
        quick: Few and small rounds: whether it works, not how fast it is.
        json: Print one JSON object as the last line; the table goes to standard error.
    """
    if compare_digest and digest is not None:
        raise InputError("--digest and --compare-digest were both given", hint="give one of them")
    fixed = {"layers": layers, "pages": pages, "page_bytes": page_bytes, "layout": layout}
    _refuse_mixture(model, fixed, {"tokens": tokens, "prefill": prefill, "decode": decode})
    case = None
    if model is not None:
        at_least("inflight", inflight, 1)
        asked = _given(tokens, 256 if quick else 4096)
        case = model_case.fitted(model, asked, prefill or "", decode or "", inflight)
    spec = TransferSpec(
        engine=engine, mechanism=mechanism, layers=_given(layers, 1), pages=_given(pages, 128 if quick else 2048),
        page_bytes=_given(page_bytes, 65536), order=order, inflight=inflight,
        repeats=_given(repeats, 3 if quick else 30), warmup=1 if quick else 2, pool=pool,
        digests=settings.DIGESTS if compare_digest else (_digest(digest),), layout=_given(layout, "page"), wait=wait,
        forward_ms=forward_ms, seed=seed, case=case, bare=bare,
    )  # fmt: skip
    report = transfer_bench.measure(spec, _say)
    _show(report, transfer_table(report), json)
    return 0


@app.command
def rooms(
    *, engine: Engine = "local", mechanism: str | None = None, request_bytes: int = 65536,
    modes: str = ",".join(HABITS), samples: int | None = None, rooms: int | None = None, window: int = 64,
    idle_s: float | None = None, peers: str | None = None, digest: str | None = None, quick: Flag = False,
    json: Flag = False,
) -> int:  # fmt: skip
    """Measure small requests: latency for each habit of a scheduler, rooms per second, idle cost, cost per peer.

    Args:
        engine: The transfer engine.
        mechanism: Option "mechanism" of the engine; the local engine knows auto, shm, cma and tcp.
        request_bytes: Bytes of one request: one page.
        modes: The schedulers' habits, separated by commas: wait (in wait()), nap (200 us between polls), yield
            (sched_yield between polls), busy (300 us of Python between polls), busy_short_switch (the same with
            sys.setswitchinterval(0.0005)); "" leaves them out.
        samples: Measured requests per mode. 300, with --quick 20.
        rooms: Requests of the throughput measurement; 0 leaves it out. 2000, with --quick 200.
        window: Requests in flight in it.
        idle_s: Seconds for which idle nodes are watched; 0 leaves them out. 5, with --quick 0.5.
        peers: Ascending numbers of connected peers, separated by commas; "" leaves them out. 1,100,1000, with
            --quick 1,3.
        digest: The setting "digest": off, sample or full; by default as it is set.
        quick: Few samples: whether it works, not how fast it is.
        json: Print one JSON object as the last line; the table goes to standard error.
    """
    spec = RoomsSpec(
        engine=engine, mechanism=mechanism, request_bytes=request_bytes, modes=tuple(_words(modes)),
        samples=_given(samples, 20 if quick else 300), warmup=5 if quick else 30,
        rooms=_given(rooms, 200 if quick else 2000), window=window, idle_s=_given(idle_s, 0.5 if quick else 5.0),
        peers=_numbers("peers", _given(peers, "1,3" if quick else "1,100,1000")), digest=_digest(digest),
    )  # fmt: skip
    report = rooms_bench.measure(spec, _say)
    _show(report, rooms_table(report), json)
    return 0


@app.command
def plan(*, repeats: int = 15, seed: int = 1, quick: Flag = False, json: Flag = False) -> int:
    """Measure how fast layouts and page lists become rows, in this process, without an engine.

    Each case makes all rows of one request between two ranks, from its page lists on; "first contact" reads a peer's
    layout, checks it, and finds the route and who sends.

    Args:
        repeats: Measured plans per case.
        seed: Decides where the pages lie.
        quick: One plan per case: whether it works, not how fast it is.
        json: Print one JSON object as the last line; the table goes to standard error.
    """
    report = plan_bench.measure(PlanSpec(1 if quick else repeats, seed), _say)
    _show(report, plan_table(report), json)
    return 0


def _show(report: TransferReport | RoomsReport | PlanReport, table: Table | Group, json: bool) -> None:
    Console(stderr=json).print(table, highlight=False)
    if json:
        print(msgspec.json.encode(report).decode())


def _refuse_mixture(model: str | None, fixed: dict[str, Any], of_model: dict[str, Any]) -> None:
    """Refuse options of both kinds of geometry together. Raises InputError."""
    given = [
        name.replace("_", "-") for name, value in (of_model if model is None else fixed).items() if value is not None
    ]
    if given and model is None:
        raise InputError(f"--{given[0]} was given without --model", hint="--model llama-3.1-8b, for instance")
    if given:
        hint = "a model and its grids say what moves: layers, pages and their sizes"
        raise InputError(f"--{given[0]} and --model were both given", hint=hint)


def _given(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _digest(given: str | None) -> str:
    return given if given is not None else settings.load(os.environ).digest


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise InputError(f"--{name} {text!r} is no list of numbers", hint="e.g. 1,100,1000") from None


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
