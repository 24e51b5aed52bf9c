"""How a process that is told what to do over its standard streams keeps them from the libraries that it runs."""

from __future__ import annotations

import os
import sys
from typing import BinaryIO

STDIN, STDOUT, STDERR = 0, 1, 2


def take_stdio() -> BinaryIO:
    """The standard output for answers alone, and `sys.stdin` for commands alone.

    From now on what is printed to the standard output goes to the standard error, and descriptor 0 is empty: native
    libraries print to the descriptor, which no setting of Python's changes, and MORI closes 0 when it ends.
    """
    answers = os.fdopen(os.dup(STDOUT), "wb")
    os.dup2(STDERR, STDOUT)
    sys.stdin = os.fdopen(os.dup(STDIN), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    return answers
