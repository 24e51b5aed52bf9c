"""The library's thread that looks for completions, which never sleeps, whatever `poll_cq_mode` says.

Each of the library's RDMA backends has one, and keeps a processor busy with it. Where there is nothing to look for, all
such threads share one processor: those of engines that write, while nothing is written; those of engines that are only
written to, always, and with a low priority, which can't be raised again without privileges.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

WATCHED_S = 0.01
"""How long it is watched which of the new threads never sleeps."""

NICE = 10
"""A tenth of what others get. Not 19, and not SCHED_IDLE: a process that is killed ends when all of its threads have
had their turn, which took 5 s and 29 s in a virtual machine whose processor others kept busy."""

_TASKS = Path("/proc/self/task")
_numbers = itertools.count()


class Spinner(NamedTuple):
    """A thread of the library that never sleeps.

    Attributes:
        thread: the kernel's number of it; 0 if it was not found.
    """

    thread: int

    @classmethod
    def none(cls, make: Callable[[], object]) -> Spinner:
        """Make what starts no such thread."""
        make()
        return cls(0)

    def park(self) -> None:
        """Have it run where the others do that have nothing to look for, and let all else go first."""
        self.rest()
        if self.thread:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self.thread, NICE)

    def rest(self) -> None:
        """Have it run where the others do that have nothing to look for."""
        everywhere = os.sched_getaffinity(0)
        self._run_on({max(everywhere)})

    def wake(self) -> None:
        """Have it run elsewhere, at once: it would wait for its turn among the others."""
        everywhere = os.sched_getaffinity(0)
        self._run_on(everywhere - {max(everywhere)} or everywhere)

    def _run_on(self, processors: set[int]) -> None:
        if self.thread:
            with contextlib.suppress(OSError):  # it is only a matter of how busy the processors are
                os.sched_setaffinity(self.thread, processors)


def started_by(make: Callable[[], object]) -> Spinner:
    """Make something on a thread of its own, and find the spinner among the threads that it has started.

    Threads have the name of the thread that has started them, by which these are told from all others.
    """
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(_found, make).result()


def _found(make: Callable[[], object]) -> Spinner:
    me, name = threading.get_native_id(), f"kvferry-{next(_numbers) % 10**6}"
    (_TASKS / str(me) / "comm").write_text(name)
    make()
    time.sleep(WATCHED_S)
    ran_ns = {thread: _ran_ns(thread) for thread in _threads_called(name) if thread != me}
    return Spinner(max(ran_ns, key=lambda thread: ran_ns[thread], default=0))


def _threads_called(name: str) -> list[int]:
    found = []
    for path in _TASKS.glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if path.read_text().strip() == name:
                found.append(int(path.parent.name))
    return found


def _ran_ns(thread: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int((_TASKS / str(thread) / "schedstat").read_text().split()[0])
    return 0
