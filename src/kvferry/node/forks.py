"""How often this process is the child of a fork: a number that is cheaper to ask for than the pid."""

from __future__ import annotations

import os

generation = 0
"""One more in each child than in its parent."""


def _forked() -> None:
    global generation  # noqa: PLW0603 - the one thing that a fork changes
    generation += 1


os.register_at_fork(after_in_child=_forked)
