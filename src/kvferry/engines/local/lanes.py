"""A few threads that serve any number of connections."""

from __future__ import annotations

import errno

from kvferry.engines.local.loop import Loop


class Lanes:
    """Threads by number, each started when it is first asked for."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._started: dict[int, Loop] = {}

    def lane(self, number: int) -> Loop:
        """The thread for this number, modulo their count.

        Raises:
            OSError: no descriptor or no thread can be had.
        """
        number %= self._count
        if number not in self._started:
            loop = Loop(f"{self._name}-{number}")
            try:
                loop.start()
            except RuntimeError as error:
                loop.stop()
                raise OSError(errno.EAGAIN, f"no thread can be started ({error})") from error
            self._started[number] = loop
        return self._started[number]

    def stop(self) -> None:
        """End the threads; what was called in them before is still done."""
        for loop in self._started.values():
            loop.stop()
        self._started.clear()
