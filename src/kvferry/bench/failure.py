"""The error of a measurement. A module of its own: worker processes import it, and they are to be small."""

from __future__ import annotations

from kvferry.errors import KvferryError


class BenchError(KvferryError):
    """A measurement could not be made: a process died, hung or failed; or the bytes that arrived are wrong."""

    code = "bench"
