"""What engines' own settings, given as text, have in common: names that are known, seconds, and one way to say no."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvferry.errors import ConfigError

MOST_SECONDS = 3600.0


def check_known(options: Mapping[str, str], known: Collection[str], engine: str) -> None:
    """Refuse a name that is none of these. Raises ConfigError."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        names = ", ".join(map(repr, known))
        raise ConfigError(f"the {engine} engine has no option {unknown[0]!r}", hint=f"its options are {names}")


def seconds_of(options: Mapping[str, str], name: str, default: str, engine: str) -> float:
    """An option that is a time. Raises ConfigError unless it is more than 0 and at most an hour."""
    text = options.get(name, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= MOST_SECONDS:
        raise wrong(name, text, f"seconds, more than 0 and at most {MOST_SECONDS:g}", engine)
    return seconds


def number_of(options: Mapping[str, str], name: str, default: int, engine: str, *, least: int = 1, most: int) -> int:
    """An option that is a whole number. Raises ConfigError unless it is from least to most."""
    text = options.get(name, str(default))
    if not text.isdecimal() or not least <= int(text) <= most:
        raise wrong(name, text, f"a number from {least} to {most}", engine)
    return int(text)


def wrong(name: str, text: str, hint: str, engine: str) -> ConfigError:
    """That an option has a value that is none."""
    return ConfigError(f"option {name!r} of the {engine} engine is {text!r}", hint=hint)
