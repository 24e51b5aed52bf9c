"""Events of a worker process: one JSON object a line, for whoever started it."""

from __future__ import annotations

import time
from typing import Any, TextIO

import msgspec


class Event(msgspec.Struct, frozen=True):
    """Something that happened.

    Attributes:
        source: who says it ("prefill", "decode").
        kind: what it is ("ready", "stage", "token", "result", "error", ...).
        at_s: time.monotonic() of the host when it happened; comparable between its processes.
        data: the particulars.
    """

    source: str
    kind: str
    at_s: float
    data: dict[str, Any] = {}


class EventWriter:
    """Writes events to a stream, each at once."""

    def __init__(self, source: str, stream: TextIO) -> None:
        self._source = source
        self._stream = stream

    def write(self, kind: str, **data: Any) -> Event:
        """Write an event that happens now."""
        event = Event(self._source, kind, time.monotonic(), data)
        self._stream.write(msgspec.json.encode(event).decode() + "\n")
        self._stream.flush()
        return event


def read_event(line: str) -> Event | None:
    """The event of a line; None if the line is something else."""
    try:
        return msgspec.json.decode(line, type=Event)
    except msgspec.DecodeError:
        return None
