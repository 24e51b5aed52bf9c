"""The connector interface: what a scheduler may call. No logic here.

None of these calls waits, except where its docstring says so. Page indices are one-dimensional integer arrays of
page numbers in this rank's pool.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.api.kvpoll import KVPoll, KVTransferMetric
from kvferry.errors import KVTransferError

Indices = npt.NDArray[np.integer] | Sequence[int]
StateIndices = Mapping[str, Indices] | Sequence[Indices] | None


class Event(Protocol):
    """Anything that can say whether it has happened, such as a device event."""

    def query(self) -> bool:
        """Whether it has happened."""
        ...


class BaseKVManager(abc.ABC):
    """One rank's registered memory, connections and rooms."""

    engine_name: str

    @abc.abstractmethod
    def update_buffers(self, args: Any) -> None:
        """Replace the registered memory: a new registration epoch. Refused while rooms run. May wait."""

    @abc.abstractmethod
    def info(self) -> dict[str, Any]:
        """What is in use and how it is doing, for logs and status pages."""

    @abc.abstractmethod
    def health(self) -> str:
        """Say what is wrong; an empty text while all is well."""

    @abc.abstractmethod
    def shutdown(self, drain_s: float = 0.0) -> None:
        """Refuse new rooms, give running ones drain_s, fail the rest, stop all threads. Waits."""


class BaseRoom(abc.ABC):
    """What a sender and a receiver have in common."""

    @abc.abstractmethod
    def poll(self) -> KVPoll:
        """The room's state. Success and Failed never change."""

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> KVPoll:
        """Wait until the room has ended, at most timeout_s; returns its state then."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable after the state changed (an eventfd: read it, then poll)."""

    @abc.abstractmethod
    def abort(self, reason: str = "") -> None:
        """End the room from this side; the other side hears the reason."""

    @abc.abstractmethod
    def clear(self) -> None:
        """The caller is done with the room: its number may be used again. A room that runs is aborted."""

    @abc.abstractmethod
    def failure_exception(self) -> None:
        """Raise the KVTransferError of a failed room. Raises ProtocolError for one that has not failed."""

    @abc.abstractmethod
    def failure(self) -> KVTransferError | None:
        """The KVTransferError of a failed room, without raising it; None for one that has not failed."""

    @abc.abstractmethod
    def is_release_safe(self) -> bool:
        """Whether the room's pages may be used for something else: nothing reads or writes them any more."""

    @abc.abstractmethod
    def get_transfer_metric(self) -> KVTransferMetric:
        """Times and bytes."""


class BaseKVSender(BaseRoom):
    """One room at a prefill rank."""

    @abc.abstractmethod
    def init(
        self, num_kv_indices: int, aux_index: int = -1, *, first_token: int = 0, num_tokens: int | None = None,
        tag: int = 0,
    ) -> None:  # fmt: skip
        """Say what will be sent.

        Args:
            num_kv_indices: pages that all sends together will name; the send that completes them is the last.
            aux_index: the request's row in the metadata buffers, read at the last send.
            first_token: the token that the first page holds first; 0 is the whole request.
            num_tokens: the request's tokens; None = not known here, whole pages count. Needed where a window is kept:
                the pages are those of the window then.
            tag: request tag (see request_tag); 0 = none.
        """

    @abc.abstractmethod
    def send(
        self, kv_indices: Indices, state_indices: StateIndices = None, *, num_kv_tokens: int | None = None,
        after: Event | None = None,
    ) -> None:  # fmt: skip
        """Hand over one chunk; legal before any receiver has come.

        Args:
            kv_indices: page numbers, in token order. An error about the arguments leaves the room as it was: send
                again, or abort.
            state_indices: with the last chunk: page (or slot, or row) numbers of each space but "kv", by name or in
                the order of the layout's spaces. Needed for every space that a decode rank gets something of.
            num_kv_tokens: tokens that these pages hold, checked against them.
            after: the pages are read only after its query() is true.
        """


class BaseKVReceiver(BaseRoom):
    """One room at a decode rank."""

    @abc.abstractmethod
    def init(self, prefill_dp_rank: int | None = None, *, tag: int = 0) -> None:
        """Begin to find the prefill ranks.

        Args:
            prefill_dp_rank: the DP rank that computes the request; None asks the bootstrap server.
            tag: request tag; 0 = none.
        """

    @abc.abstractmethod
    def send_metadata(
        self, kv_indices: Indices, aux_index: int | None = None, state_indices: StateIndices = None,
        decode_prefix_len: int = 0, *, num_tokens: int | None = None, tag: int = 0,
    ) -> None:  # fmt: skip
        """Name the pages to fill; legal right after init.

        Args:
            kv_indices: page numbers from the page of token decode_prefix_len on, in token order.
            aux_index: row of the metadata buffers to fill.
            state_indices: page (or slot, or row) numbers of each space but "kv", by name or in the order of the
                layout's spaces.
            decode_prefix_len: tokens that are here already; they are never written.
            num_tokens: the request's tokens; None = not known here, whole pages count. Needed where this rank keeps
                only some of them, a window or a share: the pages are those of these tokens then.
            tag: request tag, if init did not say it.
        """


class BaseKVBootstrapServer(abc.ABC):
    """The registry where prefill ranks register and decode ranks look them up."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop serving. Waits briefly."""
