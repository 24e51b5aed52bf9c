"""The rules of rooms, as data.

1.  All state of a room lives in the objects that these tables drive; a transition that is not in a table does not
    exist. `fire` is the only place that changes a state.
2.  Messages are snapshots with a revision. A newer one replaces an older one; they are repeated on the tick until
    acknowledged; no message is sent because a message arrived. Loss, duplication and reordering are then harmless.
3.  Terminal is not quiet. Success and Failed are reached once and never change; memory is released once, and only
    when nothing can land in it (or be read from it) any more. Suspicion (a lost connection) is never proof.
4.  What is not proven quiet within the drain limit is quarantined: counted, shown, not handed out.
5.  The first cause of a failure wins and reaches everyone who waits.
6.  Completions are looked at before deadlines; a deadline runs only while the other side can act.
7.  A lost peer does not speak again; a refusal and a close are remembered until the peer says that the claim is
    over; a record is pruned only when its last snapshot was acknowledged or the peer is lost.

The simulator (kvferry.testing.world) patches single entries of this module to show that each of them is needed.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from kvferry.errors import ProtocolError
from kvferry.wire import StatusPhase


class _Named(enum.Enum):
    """Members are looked up in tables all the time: the enum's own hash is Python code, this one is not."""

    __hash__ = object.__hash__


class OfferState(_Named):
    """The sender's room."""

    WAITING = "waiting"
    SENDING = "sending"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    DELIVERED = "delivered"
    QUIET = "quiet"


class OfferEvent(_Named):
    """What can happen to an offer."""

    INIT = "init"
    SEND = "send"
    JOIN = "join"
    POST = "post"
    LAND = "land"
    COMPLETE = "complete"
    FAIL = "fail"
    DRAINED = "drained"
    DRAIN_LIMIT = "drain limit"


class ClaimState(_Named):
    """The receiver's room."""

    RESOLVING = "resolving"
    OPEN = "open"
    PAGES = "pages"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    SUCCESS = "success"
    QUIET = "quiet"


class ClaimEvent(_Named):
    """What can happen to a claim."""

    METADATA = "metadata"
    RESOLVED = "resolved"
    STATUS = "status"
    VERIFIED = "verified"
    COMPLETE = "complete"
    FAIL = "fail"
    DRAINED = "drained"
    DRAIN_LIMIT = "drain limit"


class PeerState(_Named):
    """A registration epoch of another process, seen from here."""

    SHAKING = "shaking"
    READY = "ready"
    REFUSED = "refused"
    LOST = "lost"
    GONE = "gone"


class PeerEvent(_Named):
    """What can happen to a peer."""

    REGISTERED = "registered"
    REFUSE = "refuse"
    LOSE = "lose"
    PROVE_GONE = "prove gone"


class Row(NamedTuple):
    """One entry of a table: the state that follows, and the names of the actions, in order."""

    next: enum.Enum
    actions: tuple[str, ...] = ()


_O, _OE = OfferState, OfferEvent
_C, _CE = ClaimState, ClaimEvent
_P, _PE = PeerState, PeerEvent

OFFER: dict[tuple[enum.Enum, enum.Enum], Row] = {
    (_O.WAITING, _OE.INIT): Row(_O.WAITING, ("store", "recheck", "pump")),
    (_O.WAITING, _OE.SEND): Row(_O.WAITING, ("record", "pump")),
    (_O.WAITING, _OE.JOIN): Row(_O.WAITING, ("join", "pump")),
    (_O.WAITING, _OE.POST): Row(_O.SENDING, ("post",)),
    (_O.WAITING, _OE.COMPLETE): Row(_O.DELIVERED, ("release",)),
    (_O.WAITING, _OE.FAIL): Row(_O.DRAINING, ("fail",)),
    (_O.SENDING, _OE.SEND): Row(_O.SENDING, ("record", "pump")),
    (_O.SENDING, _OE.JOIN): Row(_O.SENDING, ("join", "pump")),
    (_O.SENDING, _OE.POST): Row(_O.SENDING, ("post",)),
    (_O.SENDING, _OE.LAND): Row(_O.SENDING, ("credit", "pump")),
    (_O.SENDING, _OE.COMPLETE): Row(_O.DELIVERED, ("release",)),
    (_O.SENDING, _OE.FAIL): Row(_O.DRAINING, ("fail",)),
    (_O.DRAINING, _OE.LAND): Row(_O.DRAINING, ("credit",)),
    (_O.DRAINING, _OE.DRAINED): Row(_O.QUIET, ("release",)),
    (_O.DRAINING, _OE.DRAIN_LIMIT): Row(_O.QUARANTINED, ("quarantine",)),
    (_O.QUARANTINED, _OE.LAND): Row(_O.QUARANTINED, ("credit",)),
    (_O.QUARANTINED, _OE.DRAINED): Row(_O.QUIET, ("release",)),
}
"""The sender's room. Failed, delivered and quiet rooms ignore what is not listed (see LATE)."""

CLAIM: dict[tuple[enum.Enum, enum.Enum], Row] = {
    (_C.RESOLVING, _CE.METADATA): Row(_C.RESOLVING, ("store",)),
    (_C.RESOLVING, _CE.RESOLVED): Row(_C.OPEN, ("open",)),
    (_C.RESOLVING, _CE.FAIL): Row(_C.QUIET, ("fail", "close", "release")),
    (_C.OPEN, _CE.METADATA): Row(_C.PAGES, ("store", "expose")),
    (_C.OPEN, _CE.STATUS): Row(_C.OPEN, ("merge",)),
    (_C.OPEN, _CE.FAIL): Row(_C.DRAINING, ("fail", "close")),
    (_C.PAGES, _CE.STATUS): Row(_C.PAGES, ("merge",)),
    (_C.PAGES, _CE.VERIFIED): Row(_C.PAGES, ("judge",)),
    (_C.PAGES, _CE.COMPLETE): Row(_C.SUCCESS, ("write_aux", "close")),
    (_C.PAGES, _CE.FAIL): Row(_C.DRAINING, ("fail", "close")),
    (_C.DRAINING, _CE.STATUS): Row(_C.DRAINING, ("merge",)),
    (_C.DRAINING, _CE.VERIFIED): Row(_C.DRAINING, ("judge",)),
    (_C.DRAINING, _CE.DRAINED): Row(_C.QUIET, ("release",)),
    (_C.DRAINING, _CE.DRAIN_LIMIT): Row(_C.QUARANTINED, ("quarantine",)),
    (_C.QUARANTINED, _CE.STATUS): Row(_C.QUARANTINED, ("merge",)),
    (_C.QUARANTINED, _CE.VERIFIED): Row(_C.QUARANTINED, ("judge",)),
    (_C.QUARANTINED, _CE.DRAINED): Row(_C.QUIET, ("release",)),
}
"""The receiver's room."""

PEER: dict[tuple[enum.Enum, enum.Enum], Row] = {
    (_P.SHAKING, _PE.REGISTERED): Row(_P.READY),
    (_P.SHAKING, _PE.REFUSE): Row(_P.REFUSED),
    (_P.SHAKING, _PE.LOSE): Row(_P.LOST),
    (_P.READY, _PE.REFUSE): Row(_P.REFUSED),
    (_P.READY, _PE.LOSE): Row(_P.LOST),
    (_P.REFUSED, _PE.LOSE): Row(_P.LOST),
    (_P.LOST, _PE.PROVE_GONE): Row(_P.GONE),
}
"""A peer. A new incarnation or epoch is a new peer; nothing leads back."""

LATE: frozenset[enum.Enum] = frozenset(
    {
        _O.DRAINING,
        _O.QUARANTINED,
        _O.DELIVERED,
        _O.QUIET,
        _C.DRAINING,
        _C.QUARANTINED,
        _C.SUCCESS,
        _C.QUIET,
        _P.REFUSED,
        _P.LOST,
        _P.GONE,
    }
)
"""States in which an event without a row is late: counted and ignored. Elsewhere it is a local mistake."""

LIVE_OFFERS = frozenset({_O.WAITING, _O.SENDING})
LIVE_CLAIMS = frozenset({_C.RESOLVING, _C.OPEN, _C.PAGES})
FAILED_OFFERS = frozenset({_O.DRAINING, _O.QUARANTINED, _O.QUIET})
FAILED_CLAIMS = frozenset({_C.DRAINING, _C.QUARANTINED, _C.QUIET})
DRAINS = frozenset({_O.DRAINING, _O.QUARANTINED, _C.DRAINING, _C.QUARANTINED})
SETTLED = frozenset({_O.DELIVERED, _O.QUIET, _C.SUCCESS, _C.QUIET})

QUIET_COUNTS_IN: frozenset[StatusPhase] = frozenset({StatusPhase.DELIVERED, StatusPhase.FAILED})
"""The quiet bit of a status means something only here: before the first write it is true and says nothing."""

PROVES_QUIET: frozenset[PeerState] = frozenset({_P.GONE})
"""Peer states that prove that nothing of the peer can land any more. LOST is suspicion, not proof."""

MAY_SPEAK: frozenset[PeerState] = frozenset({_P.READY})
"""Peer states in which a peer's room messages are heard."""

MATCHED: tuple[str, ...] = ("tag", "fan_in", "tokens", "bytes")
"""What an offer and a claim must agree on wherever both know it; each names a comparison of proto.match."""

REMEMBER_CLOSED = True
"""A close for a room that is not known here is remembered, so that an older OPEN can't join a later offer."""

REMEMBER_REFUSED = True
"""A refused claim stays refused: a later snapshot of it must not be accepted by another offer."""

PRUNE_UNACKED = False
"""Whether a settled link may be forgotten before its last snapshot was acknowledged or the claim is over."""

JOBS_PER_LINK = 2
"""Chunks of one link that may be with the mover at once: bounds what an abort has to wait for."""

PREPARE_BYTES = 1 << 20
"""Links of more bytes have their canary prepared when their pages are named, even if they are sent at once."""

LINKS_PER_PEER = 1 << 16
"""Claims of one peer that are remembered at once, refused and closed ones included; more are not heard."""

PARKED_PER_PEER = 4096
"""Claims of one peer that may wait for their offer."""


def fire(table: dict[tuple[enum.Enum, enum.Enum], Row], thing: object, event: enum.Enum, *args: object) -> bool:
    """Take one transition: set the next state, then run the row's actions as methods of `thing`.

    Returns:
        False when the event came late and was ignored.

    Raises:
        ProtocolError: the table has no such transition and the state is not one that ignores late events.
    """
    state: enum.Enum = thing.state  # type: ignore[attr-defined]
    row = table.get((state, event))
    if row is None:
        if state in LATE:
            return False
        raise ProtocolError(
            f"{type(thing).__name__.lower()} in state {state.value!r} has no event {event.value!r}",
            hint="the order of calls is wrong; see the room tables in ARCHITECTURE.md",
        )
    thing.state = row.next  # type: ignore[attr-defined]
    for action in row.actions:
        getattr(thing, action)(*args)
    return True
