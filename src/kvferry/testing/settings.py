"""What the pytest plug-in's options say to the engine suite; without the plug-in the defaults hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    """One run's choices.

    Attributes:
        required: names of engines, in lower case, whose absence is a failure instead of a skip.
        memory: provider "module:function" for suites that don't name one; "" leaves it to them.
    """

    required: frozenset[str] = frozenset()
    memory: str = ""


current = Settings()
