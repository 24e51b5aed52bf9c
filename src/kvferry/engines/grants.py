"""What peers may write here at the moment: intervals per (peer, claim), and how many writes are running."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.engines.intervals import Intervals
from kvferry.errors import InputError
from kvferry.ids import PeerId
from kvferry.plan.batch import U64

Addresses = Sequence[int] | U64


@dataclass
class _Entry:
    intervals: Intervals
    running: int = 0
    dropped: bool = False


class GrantTable:
    """The node's `Grants`: thread-safe; its lock is held for look-ups only, never while bytes are copied.

    A grant that is dropped admits nothing from that moment on, and is forgotten when its last write has
    ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[PeerId, dict[int, _Entry]] = {}

    def add(self, peer: PeerId, claim: int, starts: Addresses, ends: Addresses) -> None:
        """Let a peer write to [starts[i], ends[i]) for a claim, in addition to what was granted before.

        Args:
            peer: who may write.
            claim: the claim that the memory belongs to.
            starts: uint64[N] first addresses.
            ends: uint64[N] addresses past the end, none below its start.

        Raises:
            InputError: the arrays differ in length, an end lies below its start, an address is none, or the
                claim was dropped while one of its writes is still running.
        """
        first, past = _address_array(starts, "starts"), _address_array(ends, "ends")
        _check_interval_arrays(first, past)
        with self._lock:
            claims = self._peers.setdefault(peer, {})
            entry = claims.setdefault(claim, _Entry(Intervals.none()))
            if entry.dropped:
                raise InputError(
                    f"claim {claim} of peer {peer} was dropped and {entry.running} of its writes still run",
                    hint="use a new claim id",
                )
            old = entry.intervals
            entry.intervals = Intervals.merged(np.concatenate([old.starts, first]), np.concatenate([old.ends, past]))

    def begin(self, peer: PeerId, claim: int, addresses: Addresses, lengths: Addresses) -> str:
        """Check rows against the grant and mark it in use.

        Args:
            peer: who writes.
            claim: the claim that it writes for.
            addresses: uint64[N] where each row starts.
            lengths: uint64[N] bytes per row; 0 is refused.

        Returns:
            "" when every row lies inside one granted interval: `end` must follow; else why not.
        """
        try:
            first, nbytes = _address_array(addresses, "addresses"), _address_array(lengths, "lengths")
        except InputError as error:
            return str(error)
        if len(first) != len(nbytes):
            return f"{len(first)} addresses came with {len(nbytes)} lengths"
        entry = self._enter(peer, claim)
        if entry is None:
            return f"claim {claim} of peer {peer} is granted nothing here (never granted, or dropped)"
        row = entry.intervals.first_outside(first, nbytes)
        if row is None:
            return ""
        self.end(peer, claim)
        return (
            f"row {row} of {len(first)}, {int(nbytes[row])} bytes at {int(first[row]):#x}, does not lie in "
            f"the memory that is granted to claim {claim} of peer {peer}"
        )

    def end(self, peer: PeerId, claim: int) -> None:
        """The write that `begin` admitted is over."""
        with self._lock:
            entry = self._peers[peer][claim]
            entry.running -= 1
            if entry.dropped and not entry.running:
                self._forget(peer, claim)

    def in_use(self, peer: PeerId, claim: int | None) -> bool:
        """Whether an admitted write of this claim (None: of any claim of this peer) is still running."""
        with self._lock:
            return any(entry.running for _, entry in self._entries(peer, claim))

    def drop(self, peer: PeerId, claim: int | None) -> None:
        """Admit no more writes for this claim (None: for any claim of this peer)."""
        with self._lock:
            for number, entry in list(self._entries(peer, claim)):
                entry.dropped = True
                if not entry.running:
                    self._forget(peer, number)

    def __len__(self) -> int:
        """Grants held, dropped ones whose writes still run included."""
        with self._lock:
            return sum(len(claims) for claims in self._peers.values())

    def _enter(self, peer: PeerId, claim: int) -> _Entry | None:
        with self._lock:
            entry = self._peers.get(peer, {}).get(claim)
            if entry is None or entry.dropped:
                return None
            # counted before the rows are checked: a drop in between must wait for this write
            entry.running += 1
            return entry

    def _entries(self, peer: PeerId, claim: int | None) -> Iterator[tuple[int, _Entry]]:
        claims = self._peers.get(peer, {})
        return ((number, entry) for number, entry in claims.items() if claim is None or number == claim)

    def _forget(self, peer: PeerId, claim: int) -> None:
        claims = self._peers[peer]
        del claims[claim]
        if not claims:
            del self._peers[peer]


def _address_array(values: Addresses, what: str) -> U64:
    try:
        array = np.asarray(values, dtype=np.uint64)
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{what} of a grant are not 64-bit addresses: {error}") from error
    if array.ndim != 1:
        raise InputError(f"{what} of a grant have {array.ndim} dimensions, not 1")
    return array


def _check_interval_arrays(starts: U64, ends: U64) -> None:
    if len(starts) != len(ends):
        raise InputError(f"a grant has {len(starts)} starts and {len(ends)} ends")
    below = np.flatnonzero(ends < starts)
    if len(below):
        row = int(below[0])
        raise InputError(
            f"interval {row} of a grant ends at {int(ends[row]):#x}, below its start {int(starts[row]):#x}"
        )
