"""The handshake of one connection: Hello, then layout and engines, or a refusal in the same words on both sides.

The end that dials speaks first and repeats until it is answered; the end that is dialled answers when it has heard
both messages and its engine can reach the other end. Both ends come to the same verdict by the same function of
(prefill, decode), so either may be the one that says it.
"""

from __future__ import annotations

from kvferry.errors import Blame, Code, LayoutError, Reason
from kvferry.ids import PeerId, Side
from kvferry.layout import supports, validate
from kvferry.proto.effects import Where
from kvferry.proto.rules import PEER, PeerEvent, PeerState, fire
from kvferry.wire import FEATURES, MAJOR, MINOR, Hello, KVArgsRegisterInfo, Refused

Shake = Hello | KVArgsRegisterInfo | Refused


def incompatible(prefill: KVArgsRegisterInfo, decode: KVArgsRegisterInfo) -> str:
    """Why these two can't hand over to each other, with both values; "" if they can."""
    if prefill.side == decode.side:
        return f"side: both ends are {prefill.side}; connect a decode worker to a prefill worker"
    if (prefill.side, decode.side) != (Side.PREFILL.value, Side.DECODE.value):
        return f"side: one end is {prefill.side!r}, the other {decode.side!r}; a side is 'prefill' or 'decode'"
    if not set(prefill.engines) & set(decode.engines):
        ours, theirs = ", ".join(prefill.engines), ", ".join(decode.engines)
        return f"engine: prefill has {ours or 'none'}, decode has {theirs or 'none'}; start both with the same engine"
    if prefill.aux_bytes != decode.aux_bytes:
        rows = f"prefill {list(prefill.aux_bytes)} != decode {list(decode.aux_bytes)}"
        return f"aux row bytes: {rows}; give both sides the same metadata buffers"
    for name, register in (("prefill", prefill), ("decode", decode)):
        try:
            validate(register.layout, name)
        except LayoutError as error:
            return f"layout: {error}"
    return supports(prefill.layout, decode.layout).reason


class Handshake:
    """One connection's handshake, seen from one end.

    Attributes:
        me: this end's identity on this connection; None until the dialling end chose an epoch.
        peer: the other end, once its Hello came.
        theirs: its registration, once it came and is compatible.
        state: rules.PEER; READY once both have registered.
        reason: why it was refused.
        features: optional kinds of message that the other end understands.
    """

    def __init__(self, incarnation: int, mine: KVArgsRegisterInfo, where: Where, epoch: int | None) -> None:
        self.mine = mine
        self.where = where
        self.state = PeerState.SHAKING
        self.peer: PeerId | None = None
        self.theirs: KVArgsRegisterInfo | None = None
        self.reason: Reason | None = None
        self.features: frozenset[str] = frozenset()
        self.dials = epoch is not None
        self.me = PeerId(incarnation, epoch or 0)
        self._attached = self.dials
        self._owed = self.dials

    def hear(self, message: Shake) -> None:
        """Take a message of the handshake."""
        if isinstance(message, Refused):
            self._refuse(message.reason)
        elif isinstance(message, Hello):
            self._hello(message)
        elif self.peer is not None and self.theirs is None and self.state is PeerState.SHAKING:
            self._register(message)

    def attached(self, cause: str) -> None:
        """The engine has connected to the peer ("") or has not (why)."""
        self._attached = True
        self._owed = True
        if cause:
            self._refuse(self._reason(Code.UNREACHABLE, f"the engine can't reach the peer: {cause}", Blame.ENGINE))
        else:
            self._consider()

    def say(self, repeat: bool) -> list[Shake]:
        """What to send now; `repeat`: a heartbeat has passed."""
        waiting = self.dials and self.state is PeerState.SHAKING
        if not (self._owed or (repeat and waiting)):
            return []
        if self.state is PeerState.REFUSED:
            self._owed = False
            assert self.reason is not None
            return [self._greeting(), Refused(self.reason)]
        self._owed = False
        return [self._greeting(), self.mine]

    def _greeting(self) -> Hello:
        return Hello((MAJOR, MINOR), self.me, FEATURES)

    def _hello(self, hello: Hello) -> None:
        if self.theirs is not None and hello.peer != self.peer:
            return  # who has registered can't become someone else
        self.peer = hello.peer
        if hello.version[0] != MAJOR:
            theirs = ".".join(map(str, hello.version))
            text = f"protocol version: {self.where.side} {MAJOR}.{MINOR}, the peer {theirs}"
            self._refuse(self._reason(Code.INCOMPATIBLE, f"{text}; upgrade the older one", Blame.CONFIG))
            return
        if not self.dials:
            self.me = PeerId(self.me.incarnation, hello.peer.epoch)
            self._owed = self._owed or self.state is PeerState.READY  # it has not heard the answer yet
        self.features = frozenset(hello.features)

    def _register(self, theirs: KVArgsRegisterInfo) -> None:
        ours_first = self.where.side == Side.PREFILL.value
        cause = incompatible(self.mine, theirs) if ours_first else incompatible(theirs, self.mine)
        if cause:
            self._refuse(self._reason(Code.INCOMPATIBLE, cause, Blame.CONFIG))
            return
        self.theirs = theirs
        self._consider()

    def _consider(self) -> None:
        if self._attached and self.theirs is not None and self.state is PeerState.SHAKING:
            fire(PEER, self, PeerEvent.REGISTERED)

    def _refuse(self, reason: Reason) -> None:
        if self.reason is None:
            self.reason = reason
            self._owed = True
            fire(PEER, self, PeerEvent.REFUSE)

    def _reason(self, code: Code, cause: str, blame: Blame) -> Reason:
        return self.where.reason(code, cause, peer=str(self.peer or ""), stage="handshake", blame=blame)
