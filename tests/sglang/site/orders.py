"""What a test tells running servers to do wrong: an order is a file in a folder that both know, and so is an answer."""

from __future__ import annotations

import os
from pathlib import Path


def given(order: str) -> bool:
    """Whether the test that started this server wants it now."""
    return _file(order).exists()


def taken(order: str) -> bool:
    """The same, for an order that is for one time only."""
    try:
        _file(order).unlink()
    except FileNotFoundError:
        return False
    return True


def answer(words: str) -> None:
    """Tell the test that it has come to something."""
    _file(words).touch()


def _file(order: str) -> Path:
    return Path(os.environ["FERRY_TEST_ORDERS"], order)
