"""What the book asks the shell to do, and the facts that callers hand in. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvferry.errors import Reason, in_words
from kvferry.ids import KVPoll, PeerId
from kvferry.wire import Canary, Tick, TransferInfo, TransferStatus


class Kind(enum.Enum):
    """Which of a process's two books of rooms."""

    __hash__ = object.__hash__  # the enum's own is Python code, and members are in keys all the time

    OFFER = "offer"
    CLAIM = "claim"


class RouteSize(Protocol):
    """What the protocol needs of a plan.Route: how many bytes it moves for a request."""

    def request_bytes(
        self, prefix_tokens: int, num_tokens: int, rows: dict[str, int] = ...,
        sends: dict[str, tuple[str, ...]] | None = ...,
    ) -> int:  # fmt: skip
        """Bytes for tokens [prefix_tokens, num_tokens) and the given rows per state space, of these fields or all."""
        ...


class Times(msgspec.Struct, frozen=True):
    """The deadlines of the tables, in seconds; 0 switches hold_limit_s off."""

    tick_s: float = 0.1
    heartbeat_s: float = 1.0
    bootstrap_timeout_s: float = 30.0
    claim_timeout_s: float = 30.0
    stall_s: float = 10.0
    drain_limit_s: float = 30.0
    hold_limit_s: float = 0.0


class Chunk(msgspec.Struct, frozen=True):
    """One send() of a sender.

    Attributes:
        number: 0, 1, ... within the offer.
        first_page: position of its first page in the offer's page list.
        pages: per space, int32 page indices as raw bytes; only the main space before the last chunk.
        last: no chunk follows.
    """

    number: int
    first_page: int
    pages: dict[str, bytes]
    last: bool


class OfferFacts(msgspec.Struct, frozen=True):
    """What a sender's init() says.

    Attributes:
        num_pages: pages that will be sent in the main space.
        page_tokens: tokens per page of the main space; 0 where a rank holds only a share of the tokens, so that
            its pages say nothing of the request's length.
        first_token: the token that the first page holds first.
        num_tokens: the request's tokens; None = not known, whole pages count.
        tag: request tag; 0 = none.
    """

    num_pages: int
    page_tokens: int
    first_token: int = 0
    num_tokens: int | None = None
    tag: int = 0

    @property
    def end_tokens(self) -> int:
        """The token after the last one that the pages can hold."""
        if not self.page_tokens:
            return self.num_tokens or 0
        start = self.first_token // self.page_tokens * self.page_tokens
        return max(self.first_token, start + self.num_pages * self.page_tokens)


class ClaimFacts(msgspec.Struct, frozen=True):
    """What a receiver's send_metadata() says.

    Attributes:
        pages: per space, int32 page indices as raw bytes.
        page_tokens: tokens per page of the main space.
        num_pages: pages listed in the main space.
        prefix_tokens: tokens that are here already.
        num_tokens: the request's tokens; None = not known, whole pages count.
        rows: pages listed per state space.
        tag: request tag; 0 = none.
        wants_aux: a metadata row is to come along.
    """

    pages: dict[str, bytes]
    page_tokens: int
    num_pages: int
    prefix_tokens: int = 0
    num_tokens: int | None = None
    rows: dict[str, int] = {}
    tag: int = 0
    wants_aux: bool = False

    @property
    def end_tokens(self) -> int:
        """The token after the last one wanted, whole pages where num_tokens is not known."""
        if self.num_tokens is not None:
            return self.num_tokens
        start = self.prefix_tokens // self.page_tokens * self.page_tokens
        return max(self.prefix_tokens, start + self.num_pages * self.page_tokens)


class Source(msgspec.Struct, frozen=True):
    """One process that a claim hears from.

    Attributes:
        peer: the process.
        fan_in: how many claims its offer is to expect.
        sends: per space the fields that it sends, replicas of it send the others; None: all that both hold.
        size: how many bytes its route moves for a request.
    """

    peer: PeerId
    fan_in: int
    sends: dict[str, tuple[str, ...]] | None
    size: RouteSize


class Send(msgspec.Struct, frozen=True):
    """Hand a message to the peer's connection; if it can't be taken now it is dropped (it will be repeated)."""

    peer: PeerId
    message: TransferInfo | TransferStatus | Tick


class Submit(msgspec.Struct, frozen=True):
    """Write one chunk over one link; the shell answers with job_progress and one job_ended.

    Attributes:
        job: number of this job.
        peer: where to.
        offer: the offer whose chunk it is.
        chunk: the chunk.
        info: the claim's pages and prefix.
        first_token: the token that the offer's first page holds first.
        end_tokens: the token after the last one to copy.
    """

    job: int
    peer: PeerId
    offer: int
    chunk: Chunk
    info: TransferInfo
    first_token: int
    end_tokens: int


class Prepare(msgspec.Struct, frozen=True):
    """All but the source's pages is known of a link: what follows from it can be found out now.

    Attributes:
        offer: the offer.
        peer: where the bytes go to.
        info: the claim's pages and prefix.
        first_token: the token that the offer's first page holds first.
        end_tokens: the token after the last one that will be copied.
        digested: a digest will be asked for.
        full: of every byte.
        nbytes: how many bytes the link moves.
    """

    offer: int
    peer: PeerId
    info: TransferInfo
    first_token: int
    end_tokens: int
    digested: bool
    full: bool
    nbytes: int


class Digest(msgspec.Struct, frozen=True):
    """Take the canary of all that one link sends; the shell answers with job_digested or job_failed.

    Attributes:
        job: number of this job.
        offer: the offer.
        peer: where the bytes go to.
        chunks: all of the offer.
        info: the claim's pages and prefix.
        first_token: the token that the offer's first page holds first.
        end_tokens: the token after the last one that is copied.
        full: of every byte.
        nbytes: how many bytes the link moves.
    """

    job: int
    offer: int
    peer: PeerId
    chunks: tuple[Chunk, ...]
    info: TransferInfo
    first_token: int
    end_tokens: int
    full: bool
    nbytes: int


class Verify(msgspec.Struct, frozen=True):
    """Compare a source's canary with what has landed; the shell answers with `verified`."""

    claim: int
    peer: PeerId
    canary: Canary
    facts: ClaimFacts
    nbytes: int
    sends: dict[str, tuple[str, ...]] | None = None


class Stop(msgspec.Struct, frozen=True):
    """Submit nothing more of a job; job_ended still follows when what is out has ended."""

    job: int


class Release(msgspec.Struct, frozen=True):
    """The room's pages may be used for something else."""

    kind: Kind
    id: int


class Changed(msgspec.Struct, frozen=True):
    """The room's visible state may have changed.

    The state is that of the moment: when the effect is performed the room may have gone on, and what must be done
    before its next state is visible is not done yet.

    Attributes:
        kind: which book.
        id: the room's number in it.
        poll: the state for schedulers.
        bytes_landed: bytes that have landed.
        reason: why it failed.
        claims_success: of an offer: whether all its claims got all they wanted; None while one has not ended.
    """

    kind: Kind
    id: int
    poll: KVPoll
    bytes_landed: int = 0
    reason: Reason | None = None
    claims_success: bool | None = None


class WriteAux(msgspec.Struct, frozen=True):
    """Write the metadata row into the claim's slot, before the Changed that makes Success visible."""

    claim: int
    aux: bytes


class Expose(msgspec.Struct, frozen=True):
    """Grant the claim's pages to these peers; comes before the message that names the pages."""

    claim: int
    peers: tuple[PeerId, ...]


class Revoke(msgspec.Struct, frozen=True):
    """Withdraw the grants of a claim."""

    claim: int
    peers: tuple[PeerId, ...]


class Fence(msgspec.Struct, frozen=True):
    """Ask the engine for proof that nothing of the peer (of the claim) can land; fence_done may follow."""

    peer: PeerId
    claim: int | None


class Forget(msgspec.Struct, frozen=True):
    """The book keeps nothing of the room any more."""

    kind: Kind
    id: int


Effect = (
    Send | Submit | Prepare | Digest | Verify | Stop | Release | Changed | WriteAux | Expose | Revoke | Fence | Forget
)
Emit = Callable[[Effect], None]


class Where(msgspec.Struct, frozen=True):
    """Who speaks, for reasons."""

    side: str = ""
    rank: str = ""

    def reason(self, code: object, cause: str, **more: object) -> Reason:
        """A reason noticed here, in words that can travel."""
        return Reason(code=code, side=self.side, rank=self.rank, cause=in_words(cause), **more)  # type: ignore[arg-type]
