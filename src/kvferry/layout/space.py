"""Index spaces: how a request's tokens become the page list of one rank.

A *space* is a named index space ("kv", "swa", "mamba", ...) with a page size, a *deal* (which of a request's
tokens this rank stores) and a *coverage* (which part of the request is stored at all). Within a rank the tokens
that it was dealt are numbered 0, 1, 2, ... in token order: the *slot*. Slot s lives on page s // page_tokens of
the room's page list.
"""

from __future__ import annotations

import msgspec


class Cyclic(msgspec.Struct, frozen=True, tag="cyclic"):
    """Tokens dealt round-robin in units: unit u goes to rank u % ranks.

    ranks=1 is the whole request; unit_tokens=1 is token-interleaved (DCP); unit_tokens=page size is page-sharded.
    """

    unit_tokens: int = 1
    ranks: int = 1
    rank: int = 0


class Ranges(msgspec.Struct, frozen=True, tag="ranges"):
    """A request cut into `parts` consecutive parts; this rank holds the parts that `owned` names.

    Parts are cut in units of unit_tokens: the first (units % parts) parts get one unit more, as SGLang's context
    parallel page filter does. Contiguous CP of n ranks is (parts=n, owned=(r,)); zig-zag is
    (parts=2n, owned=(r, 2n-1-r)).
    """

    parts: int
    owned: tuple[int, ...]
    unit_tokens: int = 1


Deal = Cyclic | Ranges


class All(msgspec.Struct, frozen=True, tag="all"):
    """Every token of the request has a slot."""


class Window(msgspec.Struct, frozen=True, tag="window"):
    """Only the last `tokens` tokens are kept, from the page that holds the first of them on."""

    tokens: int


class Slot(msgspec.Struct, frozen=True, tag="slot"):
    """One slot per request (SSM or convolution state); page_tokens is 1."""


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """The caller's list of rows, row i to row i, whatever tokens they stand for.

    A page is a row; its tokens are whatever a row is made of, the same number on both sides.
    """


Coverage = All | Window | Slot | Rows


class Space(msgspec.Struct, frozen=True):
    """One index space of a layout.

    Attributes:
        name: the same on both sides.
        page_tokens: tokens (or slots, or rows) per page.
        deal: which of the request's tokens this rank stores.
        coverage: which part of the request is stored at all.
    """

    name: str = "kv"
    page_tokens: int = 16
    deal: Deal = Cyclic()
    coverage: Coverage = All()
