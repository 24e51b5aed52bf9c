"""What a sender and a receiver share: a view of the room, and calls to the control thread that never wait."""

from __future__ import annotations

import contextlib
import math
import numbers
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvferry.api.base import BaseRoom
from kvferry.api.indices import whole_number
from kvferry.api.kvpoll import KVPoll, KVTransferMetric
from kvferry.errors import Code, InputError, KVTransferError, ProtocolError, Reason, in_words
from kvferry.node.view import TERMINAL, RoomView
from kvferry.proto.book import Book
from kvferry.proto.effects import Kind

if TYPE_CHECKING:
    from kvferry.api.manager import KVManager

MAX_ROOM = MAX_TAG = 2**64 - 1


class Room(BaseRoom):
    """A room's owner on one rank: (book, number) and a view; all state is the book's."""

    kind: Kind

    def __init__(self, mgr: KVManager, bootstrap_room: int) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = whole_number(bootstrap_room, "bootstrap_room", mgr.side, most=MAX_ROOM)
        self._view = RoomView(self.bootstrap_room)
        self._number: int | None = None
        self._cleared = False
        mgr.take_room(self.kind, self)

    # -- the interface

    def poll(self) -> KVPoll:
        """The room's state; news that has come is taken first."""
        node, view = self.kv_mgr.node, self._view
        node.check_fork()
        if view.poll not in TERMINAL:
            node.control.poll()
        return view.poll

    def wait(self, timeout_s: float) -> KVPoll:
        """Wait until the room has ended."""
        self.kv_mgr.node.check_fork()
        return self._view.wait(_seconds(timeout_s, self.kv_mgr.side))

    def fileno(self) -> int:
        """An eventfd that is readable after a change."""
        self.kv_mgr.node.check_fork()
        return self._view.fileno()

    def abort(self, reason: str = "") -> None:
        """End the room from this side."""
        self.fail(Code.ABORTED, in_words(reason) or f"aborted by the {self.kv_mgr.side} side", "abort")

    def clear(self) -> None:
        """Give the room back."""
        if self._cleared:
            return
        self._cleared = True
        reason = self.kv_mgr.node.where.reason(Code.ABORTED, "cleared before it was begun", stage="clear")
        self._end(reason, lambda number: self._book.clear(time.monotonic(), self.kind, number))
        self.kv_mgr.drop_room(self.kind, self)
        self._view.close()

    def failure(self) -> KVTransferError | None:
        """The error of a failed room."""
        view = self._view
        if view.poll is not KVPoll.Failed or view.reason is None:
            return None
        return KVTransferError(self.bootstrap_room, view.reason, is_from_another_rank=view.foreign)

    def failure_exception(self) -> None:
        """Raise the error of a failed room."""
        error = self.failure()
        if error is None:
            raise ProtocolError(
                f"room {self.bootstrap_room} has not failed, its state is {self._view.poll.name}",
                hint="call failure_exception() after poll() returned Failed",
            )
        raise error

    def is_release_safe(self) -> bool:
        """Whether nothing reads or writes the room's pages any more."""
        self.kv_mgr.node.check_fork()
        view = self._view
        return view.released or view.poll is KVPoll.Success

    def get_transfer_metric(self) -> KVTransferMetric:
        """Times and bytes."""
        view = self._view
        transfer_s = view.ended_s - view.pages_s if view.ended_s and view.pages_s else None
        alloc_s = view.pages_s - view.started_s if view.pages_s else None
        return KVTransferMetric(transfer_s, alloc_s, view.bytes_landed)

    # -- for the subclasses

    def fail(self, code: Code, cause: str, stage: str) -> None:
        """Fail the room with a cause noticed here."""
        reason = self.kv_mgr.node.where.reason(code, cause, stage=stage)
        self._end(reason, lambda number: self._book.fail(time.monotonic(), self.kind, number, reason))

    @contextlib.contextmanager
    def cleared_on_error(self) -> Iterator[None]:
        """Give the room back if the block raises: its caller never gets the object that could."""
        try:
            yield
        except BaseException as error:
            self.abort(in_words(error))
            self.clear()
            raise

    def _open(self, action: Callable[[], int]) -> None:
        """Have the control thread open the room, unless it has ended by then."""
        node, view = self.kv_mgr.node, self._view

        def opened() -> None:
            node.opening.discard(view)
            if view.poll not in TERMINAL:
                self._number = action()

        node.opening.add(view)  # before the look at `ended`: one of the two threads sees the other's word
        node.call(opened)
        if node.control.ended is not None:
            view.end(node.control.ended)

    def _end(self, reason: Reason, action: Callable[[int], None]) -> None:
        """Have the control thread end the room; one that was never begun ends with `reason`."""

        def run() -> None:
            if self._number is None:
                self._view.end(reason)
            else:
                action(self._number)

        self.kv_mgr.node.call(run)

    def _post(self, action: Callable[[int], None]) -> None:
        """Have the control thread do something with the room; calls keep their order."""

        def run() -> None:
            if self._number is not None:
                action(self._number)

        self.kv_mgr.node.call(run)

    @property
    def _book(self) -> Book:
        return self.kv_mgr.node.book


def _seconds(value: object, side: str) -> float:
    """A time to wait; infinity is as long as the system can."""
    if not isinstance(value, numbers.Real) or math.isnan(value):
        raise InputError(f"{side} wait: timeout_s: {value!r} is no number of seconds")
    return min(float(value), threading.TIMEOUT_MAX)
