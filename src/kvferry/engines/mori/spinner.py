"""The library's thread that looks for completions, which never sleeps, whatever `poll_cq_mode` says.

Each of the library's RDMA backends has one, and keeps a processor busy with it. An engine that is only written to has
no completions: its thread is given a low priority, and all such threads share one processor.
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

    def park(self) -> None:
        """Have it run only where nothing else wants to, on one processor for all of them."""
        if self.thread:
            with contextlib.suppress(OSError):  # it is only a matter of how busy the processors are
                os.sched_setaffinity(self.thread, {max(os.sched_getaffinity(0))})
                os.setpriority(os.PRIO_PROCESS, self.thread, NICE)

    def release(self) -> None:
        """Let it run again, so that it sees that it is to end."""
        if self.thread:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self.thread, os.sched_getaffinity(0))
                os.setpriority(os.PRIO_PROCESS, self.thread, 0)


def parked(make: Callable[[], object]) -> Spinner:
    """Make something on a thread of its own, find among the threads that it has started the spinner, and park it.

    Threads have the name of the thread that has started them, by which these are told from all others.
    """
    with ThreadPoolExecutor(1) as aside:
        spinner = aside.submit(_found, make).result()
    spinner.park()
    return spinner


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
