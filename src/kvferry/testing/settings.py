"""What the pytest plug-in's options say to the engine suite, and how patient tests are; without either, defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.errors import ConfigError

PATIENCE_VARIABLE = "KVFERRY_TEST_PATIENCE"
MOST_PATIENCE = 1000.0


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


def patience_of(environment: Mapping[str, str]) -> float:
    """By how much to multiply the limits of what has to come, on a machine that is slow, as an emulated one.

    Waits that show that nothing comes stay as they are.

    Raises:
        ConfigError: it is no number from 1 to 1000.
    """
    text = environment.get(PATIENCE_VARIABLE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1.0 <= factor <= MOST_PATIENCE:
        raise ConfigError(f"{PATIENCE_VARIABLE} is {text!r}", hint=f"a number from 1 to {MOST_PATIENCE:g}")
    return factor


PATIENCE = patience_of(os.environ)
"""Read once; the processes that tests start inherit the variable."""
