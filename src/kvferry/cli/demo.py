"""`kvferry demo`: what it shows and what it asks for."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry import config as settings
from kvferry.api import KVClassType, get_kv_class, request_tag
from kvferry.cli.run_demo import Demo
from kvferry.cli.verdict import Outcome
from kvferry.cli.words import count
from kvferry.engines import find
from kvferry.errors import ConfigError, InputError
from kvferry.ids import Side
from kvferry.obs import Event
from kvferry.serve.cache_file import Shape
from kvferry.serve.grids import DEFAULT_GRID, check_grids, check_memory, rank_names, read_grid, shape_of
from kvferry.serve.prompt import DEFAULT_PROMPT
from kvferry.serve.rank import Request, Start
from kvferry.serve.tokenizer import Tokenizer, load_tokenizer
from kvferry.serve.weights import ModelConfig, find_model, load

MAX_PROMPT_TOKENS = 7000
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Plan:
    """What is to be run: the workers' settings, the shape of the logical cache, the request, the prompt in words."""

    start: Start
    shape: Shape
    request: Request
    tokenizer: Tokenizer
    prompt: str


def prepare(
    prompt: str | None, file: Path | None, model: str | None, engine: str, max_new_tokens: int,
    prefill: str = DEFAULT_GRID, decode: str = DEFAULT_GRID,
) -> Plan:  # fmt: skip
    """Check everything that can be wrong before a process is started.

    Raises:
        ConfigError: an unknown or unusable engine, a missing or foreign model file, an empty or too long prompt, or
            grids that can't be run.
    """
    settings.load(os.environ)
    engine = find.canonical(engine)
    get_kv_class(engine, KVClassType.MANAGER)
    find.load(engine)
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {max_new_tokens} is below 1")
    grids = read_grid(prefill, Side.PREFILL), read_grid(decode, Side.DECODE)
    text = _prompt_text(prompt, file)
    path = find_model(model)
    tokenizer = load_tokenizer(path)
    config = load(path).config
    tokens = tokenizer.encode_chat([("user", text)])
    _check_length(len(tokens), config, max_new_tokens)
    check_memory(config, grids[0], len(tokens))
    check_grids(shape_of(path.name, config), *grids, len(tokens), config.context_tokens)
    start = Start(model, engine, len(tokens), len(tokens) + max_new_tokens, prefill, decode)
    shape = (config.layers, 2, config.kv_heads, len(tokens), config.head_dim)
    request = Request(secrets.randbits(48), request_tag(tokens), len(tokens), max_new_tokens, tokens)
    return Plan(start, shape, request, tokenizer, text)


def run(plan: Plan, console: Console) -> Outcome:
    """Run the demo with its live view on `console`; without a terminal, with a line per stage on standard error."""
    if console.is_terminal and not console.is_dumb_terminal:
        demo, outcome = _run_live(plan, console)
    else:
        demo = Demo(plan.start, plan.shape, plan.request, print_stage)
        outcome = demo.run()
    outcome.text = plan.tokenizer.decode(demo.tokens)
    return outcome


def _run_live(plan: Plan, console: Console) -> tuple[Demo, Outcome]:
    view = LiveView(plan)
    with Live(view.render(), console=console, refresh_per_second=10, transient=True) as live:

        def show(event: Event) -> None:
            view.take(event)
            live.update(view.render())

        demo = Demo(plan.start, plan.shape, plan.request, show)
        return demo, demo.run()


def stage_of(event: Event) -> str:
    """The stage that a worker enters with this event; empty if it stays in its stage."""
    if event.kind == "stage":
        return str(event.data["text"])
    return "done" if event.kind == "done" else ""


def print_stage(event: Event) -> None:
    """Print a line to standard error if a worker enters a stage."""
    stage = stage_of(event)
    if stage:
        print(f"{event.source}: {stage}", file=sys.stderr, flush=True)


class LiveView:
    """Stages, bytes and tokens as they come."""

    def __init__(self, plan: Plan) -> None:
        self._request, self._tokenizer = plan.request, plan.tokenizer
        names = [rank_names(side, read_grid(text, side)) for side, text in _grids(plan.start)]
        self._stages = dict.fromkeys([name for side in names for name in side], "starting")
        self._tokens: dict[str, list[int]] = {name: [] for name in self._stages}
        self._decoder = names[1][0]
        self._bytes = 0

    def take(self, event: Event) -> None:
        """Note an event."""
        self._stages[event.source] = stage_of(event) or self._stages[event.source]
        if event.kind == "token":
            self._tokens[event.source].append(event.data["token"])
        elif event.kind == "received":
            self._bytes += event.data["kv_bytes"]

    def render(self) -> Table:
        """The view as it stands."""
        table = Table.grid(padding=(0, 2))
        for name, stage in self._stages.items():
            tokens = len(self._tokens[name])
            progress = f"{tokens} of {self._request.max_new_tokens} tokens" if tokens else ""
            table.add_row(Text(name, "bold"), stage, progress)
        moved = f"{self._bytes:,} bytes of KV cache" if self._bytes else f"{self._request.num_tokens} prompt tokens"
        table.add_row(Text("handed over", "bold"), moved, "")
        table.add_row(Text("text", "bold"), Text(self._tokenizer.decode(self._tokens[self._decoder])), "")
        return table


def summary(outcome: Outcome, plan: Plan, total_s: float) -> Table:
    """The short summary at the end."""
    table = Table.grid(padding=(0, 2))
    speed = f"{outcome.gb_per_s:.2f} GB/s, {outcome.memcpy_ratio:.2g} of a memcpy of the same bytes"
    rows: dict[str, Text | str] = {
        "prompt": Text(f"{count(plan.request.num_tokens, 'token')}: {_ending(plan.prompt)}"),
        "text": Text(outcome.text),
        **_grid_rows(outcome),
        "engine": outcome.engine,
        "KV cache": f"{outcome.kv_bytes:,} bytes in {outcome.transfer_s * 1e3:.2f} ms, {speed}",
        "first token": f"{outcome.ttft_s:.2f} s after the request",
        "total": f"{total_s:.2f} s, with the start of {_workers(outcome)}",
        "KV bytes": _verdict(outcome.kv_bytes_equal, "on both sides, every byte compared"),
        "tokens": _verdict(outcome.tokens_equal, "to those of one process that decodes from the same bytes"),
        "logits": _verdict(outcome.logits_equal, "to the last bit"),
    }
    for name, value in rows.items():
        table.add_row(Text(name, "bold"), value)
    return table


def as_json(outcome: Outcome) -> str:
    """The object of `--json`."""
    shown: dict[str, Any] = {
        each.name: getattr(outcome, each.name) for each in fields(outcome) if each.metadata.get("in_json", True)
    }
    return msgspec.json.encode(shown).decode()


def _grids(start: Start) -> tuple[tuple[Side, str], tuple[Side, str]]:
    return (Side.PREFILL, start.prefill), (Side.DECODE, start.decode)


def _grid_rows(outcome: Outcome) -> dict[str, Text | str]:
    """Both grids, unless both are the default."""
    grids = {"prefill": outcome.prefill, "decode": outcome.decode}
    if set(grids.values()) == {DEFAULT_GRID}:
        return {}
    return {
        side: Text(f"{count(ranks, 'rank')}: {text}")
        for (side, text), ranks in zip(grids.items(), outcome.ranks, strict=True)
    }


def _workers(outcome: Outcome) -> str:
    workers = sum(outcome.ranks)
    return "both workers" if workers == 2 else f"all {workers} workers"


def _verdict(equal: bool, what: str) -> Text:
    return Text(f"equal {what}", "green") if equal else Text(f"NOT equal {what}", "bold red")


def _ending(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"...{line[-SHOWN_CHARACTERS:]}"


def _check_length(tokens: int, config: ModelConfig, max_new_tokens: int) -> None:
    context = config.context_tokens
    if max_new_tokens >= context:
        raise InputError(f"--max-new-tokens {max_new_tokens}: the model has a context of {context} tokens")
    room = context - max_new_tokens
    if tokens > room and room < MAX_PROMPT_TOKENS:
        helps = tokens < context and tokens <= MAX_PROMPT_TOKENS
        raise InputError(
            f"the prompt has {tokens} tokens; at most {room} fit into the model's context of {context}, "
            f"with --max-new-tokens {max_new_tokens}",
            hint="shorten it, or lower --max-new-tokens" if helps else "shorten it",
        )
    if tokens > MAX_PROMPT_TOKENS:
        raise InputError(
            f"the prompt has {tokens} tokens; the demo takes at most {MAX_PROMPT_TOKENS} prompt tokens",
            hint="shorten it",
        )


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise InputError("--prompt and --file were both given", hint="give one of them")
    if file is not None:
        try:
            prompt = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"--file {file} is not UTF-8 text") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"--file {file}: {getattr(error, 'strerror', None) or error}") from None
    text = DEFAULT_PROMPT if prompt is None else prompt
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError("--prompt is not UTF-8 text") from None
    if not text.strip():
        raise InputError("the prompt is empty", hint="leave --prompt and --file away for the default")
    return text
