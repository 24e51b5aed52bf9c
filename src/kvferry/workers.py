"""Threads that run before anything is given to them."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_all: weakref.WeakSet[Workers] = weakref.WeakSet()


class Workers:
    """A fixed number of threads. All methods may be called from any thread.

    concurrent.futures.ThreadPoolExecutor queues a task first and starts a thread for it after: where no thread is to be
    had the caller is told so, and yet the task is done some other time - once more than it should be, or in memory that
    belongs to somebody else by then. Here the threads are there, or what is to be done is done by the caller.

    Attributes:
        problem: why there are fewer than were asked for, "" where there are not.
    """

    def __init__(self, number: int, name: str) -> None:
        """Start up to `number` threads of that name: as many as can be had, 0 too."""
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        _all.add(self)
        self.problem = ""
        try:
            for _ in range(number):
                thread = threading.Thread(target=self._main, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.problem = str(error)

    @property
    def running(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Have something done by a thread; cancelled where there is none, or none any more."""
        future: Future[Result] = Future()
        with self._closing:
            if self._closed or not self._threads:
                future.cancel()
            else:
                self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """Cancel what was not begun, wait for what was, and end the threads."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            while not self._tasks.empty():
                self._cancel_next()
            for _ in self._threads:
                self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    @property
    def is_here(self) -> bool:
        """Whether the threads are this process's: a forked child has none of them."""
        return self._pid == os.getpid()

    def _cancel_next(self) -> None:
        with contextlib.suppress(queue.Empty):  # a thread was faster
            if given := self._tasks.get_nowait():
                given[0].cancel()

    def _main(self) -> None:
        while (given := self._tasks.get()) is not None:
            future, task = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = task()
            except BaseException as error:  # noqa: BLE001 - raised again by who asked
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, task, given  # what a task holds is not held until the next one comes


@atexit.register
def _close_all() -> None:
    """A thread that is inside of a C++ library when the interpreter ends makes the process abort."""
    for workers in list(_all):
        if workers.is_here:
            workers.close()
