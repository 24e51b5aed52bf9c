"""`kvferry demo`: what it shows and what it asks for."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry import config as settings
from kvferry.api import KVClassType, get_kv_class, request_tag
from kvferry.cli.run_demo import Demo, Outcome
from kvferry.engines import find
from kvferry.errors import ConfigError, InputError
from kvferry.obs import Event
from kvferry.serve.prompt import DEFAULT_PROMPT
from kvferry.serve.tokenizer import Tokenizer, load_tokenizer
from kvferry.serve.weights import find_model, load
from kvferry.serve.worker import Request, Start

MAX_PROMPT_TOKENS = 7000


def prepare(
    prompt: str | None, file: Path | None, model: str | None, engine: str, max_new_tokens: int
) -> tuple[Start, Request, Tokenizer]:
    """Check everything that can be wrong before a process is started.

    Raises:
        ConfigError: an unknown or unusable engine, a missing or foreign model file, an empty or too long prompt.
    """
    settings.load(os.environ)
    get_kv_class(engine, KVClassType.MANAGER)
    find.load(engine)
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {max_new_tokens} is below 1")
    text = _prompt_text(prompt, file)
    path = find_model(model)
    tokenizer = load_tokenizer(path)
    context = load(path).config.context_tokens
    if max_new_tokens >= context:
        raise InputError(f"--max-new-tokens {max_new_tokens}: the model has a context of {context} tokens")
    tokens = tokenizer.encode_chat([("user", text)])
    limit = min(MAX_PROMPT_TOKENS, context - max_new_tokens)
    if len(tokens) > limit:
        raise InputError(
            f"the prompt has {len(tokens)} tokens, at most {limit} fit (context {context}, {max_new_tokens} new)",
            hint="shorten it, or lower --max-new-tokens",
        )
    start = Start(model, engine, "", len(tokens) + max_new_tokens, 0)
    request = Request(secrets.randbits(48), request_tag(tokens), len(tokens), max_new_tokens, tokens)
    return start, request, tokenizer


def run(start: Start, request: Request, tokenizer: Tokenizer, console: Console) -> Outcome:
    """Run the demo with its live view on `console`."""
    view = LiveView(request, tokenizer)
    with Live(view.render(), console=console, refresh_per_second=10, transient=True) as live:

        def show(event: Event) -> None:
            view.take(event)
            live.update(view.render())

        demo = Demo(start, request, show)
        outcome = demo.run()
    outcome.text = tokenizer.decode(demo.tokens)
    return outcome


class LiveView:
    """Stages, bytes and tokens as they come."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._stages = {"prefill": "starting", "decode": "starting"}
        self._tokens: dict[str, list[int]] = {"prefill": [], "decode": []}
        self._bytes = 0

    def take(self, event: Event) -> None:
        """Note an event."""
        if event.kind == "stage":
            self._stages[event.source] = event.data["text"]
        elif event.kind == "token":
            self._tokens[event.source].append(event.data["token"])
        elif event.kind == "received":
            self._bytes = event.data["kv_bytes"]
        elif event.kind == "handed over":
            self._stages["prefill"] = "decoding from its own pages, to compare"
        elif event.kind == "generated":
            self._stages[event.source] = "done"

    def render(self) -> Table:
        """The view as it stands."""
        table = Table.grid(padding=(0, 2))
        for side, stage in self._stages.items():
            tokens = len(self._tokens[side])
            progress = f"{tokens} of {self._request.max_new_tokens} tokens" if tokens else ""
            table.add_row(Text(side, "bold"), stage, progress)
        moved = f"{self._bytes:,} bytes of KV cache" if self._bytes else f"{self._request.num_tokens} prompt tokens"
        table.add_row(Text("handed over", "bold"), moved, "")
        table.add_row(Text("text", "bold"), Text(self._tokenizer.decode(self._tokens["decode"])), "")
        return table


def summary(outcome: Outcome) -> Table:
    """The short summary at the end."""
    table = Table.grid(padding=(0, 2))
    speed = f"{outcome.gb_per_s:.2f} GB/s, {outcome.memcpy_ratio:.2f} of a memcpy of the same bytes"
    rows: dict[str, Text | str] = {
        "text": Text(outcome.text),
        "engine": outcome.engine,
        "KV cache": f"{outcome.kv_bytes:,} bytes in {outcome.transfer_s * 1e3:.2f} ms, {speed}",
        "first token": f"{outcome.ttft_s:.2f} s after the request",
        "KV bytes": _verdict(outcome.kv_bytes_equal, "on both sides, per layer, page and head"),
        "tokens": _verdict(outcome.tokens_equal, "to those of one process that decodes from the same bytes"),
        "logits": _verdict(outcome.logits_equal, "to the last bit"),
    }
    for name, value in rows.items():
        table.add_row(Text(name, "bold"), value)
    return table


def as_json(outcome: Outcome) -> str:
    """The object of `--json`."""
    fields: dict[str, Any] = {name: getattr(outcome, name) for name in outcome.__dataclass_fields__}
    return msgspec.json.encode(fields).decode()


def _verdict(equal: bool, what: str) -> Text:
    return Text(f"equal {what}", "green") if equal else Text(f"NOT equal {what}", "bold red")


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise InputError("--prompt and --file were both given", hint="give one of them")
    if file is not None:
        try:
            prompt = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--file {file}: {error}") from None
    text = DEFAULT_PROMPT if prompt is None else prompt
    if not text.strip():
        raise InputError("the prompt is empty", hint="leave --prompt and --file away for the default")
    return text
