"""Requests to SGLang servers, as a router makes them: the same one to both sides, at the same time."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models import NEW_TOKENS, Reference

if TYPE_CHECKING:
    from servers import Pair

ANSWER_LIMIT_S = 60.0
_NO_ANSWER = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class Answer:
    """What a server said.

    Attributes:
        status: of HTTP; 0 if the connection was lost or nothing came in time.
        body: parsed, or text.
        took_s: until it came.
    """

    status: int
    body: Any
    took_s: float

    @property
    def tokens(self) -> list[int] | None:
        """The generated tokens, if there are any."""
        return self.body.get("output_ids") if self.status == 200 and isinstance(self.body, dict) else None


@dataclass(frozen=True)
class Exchange:
    """One request, at both sides."""

    room: int
    reference: Reference
    prefill: Answer
    decode: Answer

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.reference.prompt)

    @property
    def is_right(self) -> bool:
        """Whether decode generated what it must."""
        return self.decode.tokens == self.reference.tokens

    def __str__(self) -> str:
        said = f"prefill said {self.prefill}, decode said {self.decode}"
        return f"room {self.room}, {self.prompt_tokens} tokens, must be {self.reference.tokens}: {said}"


def get_status(port: int, path: str) -> int:
    """HTTP status of a GET; 0 if nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except _NO_ANSWER:
        return 0
    finally:
        connection.close()


def post(port: int, path: str, body: Any, limit_s: float = ANSWER_LIMIT_S) -> Answer:
    """POST something as JSON."""
    begun = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, text = response.status, response.read().decode(errors="replace")
    except _NO_ANSWER as error:
        status, text = 0, repr(error)
    finally:
        connection.close()
    return Answer(status, _parsed(text), time.monotonic() - begun)


def stream(port: int, path: str, body: Any, limit_s: float = ANSWER_LIMIT_S) -> Iterator[Any]:
    """POST something whose answer is events, parsed as they come; each has all tokens so far."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])
    finally:
        connection.close()


def generation(reference: Reference, **extra: Any) -> dict[str, Any]:
    """The body of a request for the reference's tokens."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return {"input_ids": reference.prompt, "sampling_params": sampling, **extra}


def new_room() -> int:
    """A room number, as a router draws it."""
    return random.getrandbits(62) | 1


def exchange(pair: Pair, reference: Reference, room: int = 0, **extra: Any) -> Exchange:
    """One request through both servers."""
    room = room or new_room()
    body = generation(reference, **pair.rendezvous(room), **extra)
    ports = (pair.prefill.port, pair.decode.port)
    prefill, decode = at_once([lambda port=port: post(port, "/generate", body) for port in ports])
    return Exchange(room, reference, prefill, decode)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make calls in threads of their own; returns their results in order. Raises what the first of them raised."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return results


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
