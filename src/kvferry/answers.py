"""The answers of a process that is told what to do over its standard input, apart from what libraries print."""

from __future__ import annotations

import os
from typing import BinaryIO

STDOUT, STDERR = 1, 2


def take_stdout() -> BinaryIO:
    """The standard output for answers alone; from now on what is printed to it goes to the standard error.

    Native libraries print to the descriptor, which no setting of Python's changes.
    """
    answers = os.fdopen(os.dup(STDOUT), "wb")
    os.dup2(STDERR, STDOUT)
    return answers
