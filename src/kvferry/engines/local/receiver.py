"""The target's end of one TCP connection: a thread that checks rows and receives them into granted memory."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from kvferry.engines.local import frames
from kvferry.engines.local.iovec import Cursor, row_at, vectors_of
from kvferry.engines.local.syscalls import receive_vectors
from kvferry.engines.local.waker import Waker
from kvferry.engines.seam import Grants
from kvferry.errors import WireError
from kvferry.ids import PeerId
from kvferry.plan.batch import U64, Limits

_DRAIN_BYTES = 256 << 10


class _EndedError(Exception):
    """The connection is over: closed by the writer, cut here, or replaced."""


class Receiver:
    """Receives the batches of one writer until the connection ends.

    Not a byte of a batch enters memory before all its rows were found inside the claim's grant. A batch
    that is refused, or cut by a fence, is read to its end and thrown away, so that the connection's other
    claims go on.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: PeerId,
        grants: Grants,
        limits: Limits,
        on_change: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.replaces: list[Receiver] = []
        self._socket = connection
        self._grants = grants
        self._limits = limits
        self._on_change = on_change
        self._waker = Waker()
        self._cut_claims: set[int] = set()
        self._cut_all = False
        self._words = np.empty(2 * limits.rows, np.uint64)
        self._head = bytearray(max(frames.BATCH_BYTES, frames.REPLY_BYTES))
        self._thread = threading.Thread(target=self._run, name=f"kvferry-local-recv-{peer}", daemon=True)
        self._on_end: Callable[[Receiver], None] = lambda _receiver: None
        self._on_garbage: Callable[[], None] = lambda: None

    def start(self, on_end: Callable[[Receiver], None], on_garbage: Callable[[], None]) -> None:
        """Start the thread; it calls on_garbage when a frame makes no sense, and on_end as the last thing."""
        self._on_end, self._on_garbage = on_end, on_garbage
        self._thread.start()

    def discard(self) -> None:
        """Free the descriptors of a connection that was refused before `start`."""
        self._waker.close()
        self._socket.close()

    def cut(self, claim: int | None) -> None:
        """Receive no more into memory for this claim; None: end the connection. Any thread may call it."""
        if claim is None:
            self._cut_all = True
        else:
            self._cut_claims.add(claim)
        self._waker.set()

    def join(self) -> None:
        """Wait until the thread has ended; soon after `cut(None)`."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._replace_older()
            self._send(frames.encode_reply(frames.OK))
            while True:
                self._one_batch()
        except (_EndedError, OSError):
            pass  # the writer learns it from the closed connection, the target needs nothing from it
        except WireError:
            self._on_garbage()
        finally:
            self.discard()
            self._on_end(self)
            self._on_change()

    def _replace_older(self) -> None:
        # our OK proves to the writer that nothing it sent by an earlier connection can still land
        for older in self.replaces:
            older.cut(None)
        for older in self.replaces:
            older.join()
        self.replaces = []

    def _one_batch(self) -> None:
        head = frames.decode_batch(self._read_head(), self._limits)
        dst, nbytes = self._read_rows(head)
        refusal = self._grants.begin(self.peer, head.claim, cast("Sequence[int]", dst), cast("Sequence[int]", nbytes))
        received = 0
        if not refusal:
            received, refusal = self._receive(head, dst, nbytes)
        if refusal:
            self._drain(head.total_bytes - received)
        code = frames.REFUSED if refusal else frames.OK
        self._send(frames.encode_reply(code, head.ticket, refusal))

    def _read_head(self) -> bytes:
        head = memoryview(self._head)[: frames.BATCH_BYTES]
        self._read_into(head)
        return bytes(head)

    def _read_rows(self, head: frames.BatchHeader) -> tuple[U64, U64]:
        words = self._words[: 2 * head.rows]
        self._read_into(words.view(np.uint8).data)
        dst, nbytes = words[: head.rows], words[head.rows :]
        # each is bounded before they are added, or the sum could wrap round to the right number
        if int(nbytes.max()) > head.total_bytes or int(nbytes.sum()) != head.total_bytes:
            raise WireError(f"a batch claims {head.total_bytes} bytes and its rows add up to something else")
        return dst, nbytes

    def _receive(self, head: frames.BatchHeader, dst: U64, nbytes: U64) -> tuple[int, str]:
        cursor = Cursor(vectors_of(dst, nbytes), head.total_bytes)
        try:
            return self._receive_rows(head.claim, cursor, nbytes)
        finally:
            self._grants.end(self.peer, head.claim)
            self._on_change()

    def _receive_rows(self, claim: int, cursor: Cursor, nbytes: U64) -> tuple[int, str]:
        while cursor.left:
            self._check_cut()
            if claim in self._cut_claims:
                return cursor.done, f"a fence on claim {claim} cut this batch after {cursor.done} bytes"
            try:
                count = receive_vectors(self._socket.fileno(), cursor.window())
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
                row = row_at(nbytes, cursor.done)
                return (
                    cursor.done,
                    f"row {row} of {len(nbytes)} or one after it is not writable memory here (EFAULT)",
                )
            if not count:
                raise _EndedError
            cursor.advance(count)
        return cursor.done, ""

    def _drain(self, nbytes: int) -> None:
        waste = memoryview(bytearray(min(nbytes, _DRAIN_BYTES)))
        while nbytes:
            nbytes -= self._read_some(waste[: min(nbytes, len(waste))])

    def _read_into(self, view: memoryview) -> None:
        while len(view):
            view = view[self._read_some(view) :]

    def _read_some(self, view: memoryview) -> int:
        while True:
            self._check_cut()
            try:
                count = self._socket.recv_into(view)
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            if not count:
                raise _EndedError
            return count

    def _send(self, raw: bytes) -> None:
        while raw:
            self._check_cut()
            try:
                raw = raw[self._socket.send(raw) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def _check_cut(self) -> None:
        if self._cut_all:
            raise _EndedError

    def _wait(self, event: int) -> None:
        poller = select.poll()
        poller.register(self._socket.fileno(), event)
        poller.register(self._waker.fileno(), select.POLLIN)
        if any(fd == self._waker.fileno() for fd, _ in poller.poll()):
            # whoever woke us has set its flag before, and our caller looks at the flags next
            self._waker.clear()
