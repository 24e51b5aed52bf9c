"""What to do, and to say, when no file descriptor is left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def descriptor_limit() -> int:
    """How many files this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def why_none_is_left(side: str, error: OSError) -> str:
    """Say in words that a process can serve no more connections, and what to do.

    Args:
        side: whose process it is, as the subject of the sentence.
        error: what the system said.
    """
    if error.errno not in OUT_OF_DESCRIPTORS:
        return f"{side} can serve no more connections: {error.strerror}"
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    return (
        f"{side} can open no more connections ({name}; at most {descriptor_limit()} open files): raise its limit "
        "(`ulimit -n`, LimitNOFILE of systemd)"
    )


class Spare:
    """A descriptor kept back, so that a caller can still be told that there is none."""

    def __init__(self) -> None:
        self._fd = -1
        self.keep()

    def give(self) -> bool:
        """Free it; returns whether there was one."""
        if self._fd < 0:
            return False
        os.close(self._fd)
        self._fd = -1
        return True

    def keep(self) -> None:
        """Take one again, if one is free."""
        if self._fd < 0:
            with contextlib.suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
