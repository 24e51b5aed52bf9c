"""What `kvferry explain` finds out: who sends what to whom for one request, from the planner itself. No I/O.

Layouts are made of presets and bound to addresses that nobody has: the planner needs numbers, not memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.cli.rows import RowCounter
from kvferry.cli.spans import Part, Tokens, common_parts, common_tokens, unsent_layers
from kvferry.errors import ConfigError, InputError
from kvferry.ids import Rank
from kvferry.layout import Layout, bind, covers, supports, validate
from kvferry.plan import Election, holdings, route
from kvferry.presets import Grid, ModelShape, layouts_of

MAX_TOKENS = 1 << 20
"""Of a request: rows are counted one batch after the other, but page lists are made whole."""
MAX_PAIRS = 1024
"""Of a prefill and a decode rank."""
_LOWEST_ADDRESS = 1 << 20


@dataclass(frozen=True)
class Ask:
    """What is to be explained.

    Attributes:
        prefill_model: what prefill runs.
        decode_model: what decode runs.
        prefill: prefill's grid; one DP group of it serves the request.
        decode: decode's grid, likewise.
        tokens: tokens of the request.
        prefix: tokens that decode already has.
        room: the room's number, which spreads replicas.
    """

    prefill_model: ModelShape
    decode_model: ModelShape
    prefill: Grid
    decode: Grid
    tokens: int
    prefix: int = 0
    room: int = 0


class Line(msgspec.Struct, frozen=True):
    """What one rank sends to another in one space.

    Attributes:
        prefill: the source.
        decode: the destination.
        space: the space.
        parts: fields with their layers and heads.
        tokens: which tokens.
        bytes: bytes that move.
        rows: rows of the planner's batches, with pages scattered at random on both sides.
    """

    prefill: Rank
    decode: Rank
    space: str
    parts: list[Part]
    tokens: Tokens
    bytes: int
    rows: int


class Total(msgspec.Struct, frozen=True):
    """Of one rank."""

    rank: Rank
    bytes: int
    rows: int


class Choice(msgspec.Struct, frozen=True):
    """Prefill ranks that hold the same of a destination, of which one sends.

    Attributes:
        decode: the destination.
        space: the space.
        fields: the fields.
        elected: who sends in this room.
        others: who may be elected in another room.
        spared: who holds the same and serves other destinations.
    """

    decode: Rank
    space: str
    fields: list[str]
    elected: Rank
    others: list[Rank]
    spared: list[Rank]


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; without `fits` only `refusal` has a meaning.

    Attributes:
        fits: whether the two sides fit.
        refusal: why not, in the planner's words.
        lines: who sends what to whom.
        sources: totals of each prefill rank, those that send nothing too.
        destinations: totals of each decode rank.
        bytes: bytes of the request.
        rows: rows of the request.
        choices: where data is replicated.
        unsent: decode's optional layers that no prefill rank holds, by space: they stay as they are.
    """

    fits: bool
    refusal: str = ""
    lines: list[Line] = []
    sources: list[Total] = []
    destinations: list[Total] = []
    bytes: int = 0
    rows: int = 0
    choices: list[Choice] = []
    unsent: dict[str, list[tuple[int, int]]] = {}


def explain(ask: Ask) -> Explained:
    """Plan the request, and say what was planned.

    Raises:
        ConfigError: numbers out of bounds, a grid that does not fit its model, a prefix inside a granule.
    """
    _check(ask)
    sources, targets = _bound(ask)
    if refusal := _refusal(sources, targets):
        return Explained(fits=False, refusal=refusal)
    elections = [Election(target, sources, targets) for target in targets]
    counter = RowCounter(ask.prefix, ask.tokens)
    lines: list[Line] = []
    for target, election in zip(targets, elections, strict=True):
        for source, share in zip(sources, election.shares(ask.room), strict=True):
            lines += _lines(source, target, share.sends, ask, counter)
    return Explained(
        fits=True,
        lines=lines,
        sources=[_total(layout.rank, [line for line in lines if line.prefill == layout.rank]) for layout in sources],
        destinations=[
            _total(layout.rank, [line for line in lines if line.decode == layout.rank]) for layout in targets
        ],
        bytes=sum(line.bytes for line in lines),
        rows=sum(line.rows for line in lines),
        choices=[
            choice
            for target, election in zip(targets, elections, strict=True)
            for choice in _choices(target, sources, election, ask.room)
        ],
        unsent=unsent_layers(sources, targets),
    )


def _check(ask: Ask) -> None:
    if not 1 <= ask.tokens <= MAX_TOKENS:
        raise InputError(f"--tokens {ask.tokens} is not within 1 and {MAX_TOKENS}")
    if not 0 <= ask.prefix <= ask.tokens:
        what = f"--prefix {ask.prefix} is not within 0 and --tokens {ask.tokens}"
        raise InputError(what, hint="the prefix is what decode already has of the request")
    if not 0 <= ask.room < 1 << 64:
        raise InputError(f"--room {ask.room} is not within 0 and 2**64 - 1")
    if (pairs := ask.prefill.size * ask.decode.size) > MAX_PAIRS:
        what = f"--prefill has {ask.prefill.size} ranks and --decode {ask.decode.size} in a DP group: {pairs} pairs"
        raise InputError(f"{what}, at most {MAX_PAIRS}", hint="explain a smaller grid; what differs is only the size")


def _bound(ask: Ask) -> tuple[list[Layout], list[Layout]]:
    """The layouts of both sides, each at addresses of its own."""
    begin = _LOWEST_ADDRESS
    sides: list[list[Layout]] = []
    for side, model, grid in (
        ("prefill", ask.prefill_model, ask.prefill),
        ("decode", ask.decode_model, ask.decode),
    ):
        layouts = []
        for layout in _unbound(side, model, grid, ask.tokens):
            nbytes = max(tensor.address + tensor.nbytes for tensor in layout.tensors)
            layouts.append(bind(layout, [(begin, nbytes)]))
            begin += nbytes
            validate(layouts[-1], side, bound=True)
        sides.append(layouts)
    return sides[0], sides[1]


def _unbound(side: str, model: ModelShape, grid: Grid, tokens: int) -> list[Layout]:
    """Pools of twice the pages that the request needs: the pages of a list are drawn from them."""
    try:
        return layouts_of(model, grid, 2 * (-(-tokens // grid.page) + 1))
    except ConfigError as error:
        raise InputError(f"--{side}: {error.message}", hint=error.hint) from None


def _refusal(sources: Sequence[Layout], targets: Sequence[Layout]) -> str:
    for target in targets:
        for source in sources:
            if reason := supports(source, target).reason:
                return f"prefill {source.rank} to decode {target.rank}: {reason}"
        if reason := covers(sources, target):
            return f"decode {target.rank}: {reason}"
    return ""


def _lines(
    source: Layout, target: Layout, sends: Mapping[str, Sequence[str]], ask: Ask, counter: RowCounter
) -> Iterator[Line]:
    if not sends:
        return
    planned = route(source, target).only(sends)
    for space, leg in planned.legs.items():
        tokens = common_tokens(leg.src, leg.dst, *leg.extent(ask.prefix, ask.tokens, 0), ask.tokens)
        count = counter.count(planned, space)
        if count.rows:
            parts = common_parts(source, target, space, sends[space])
            yield Line(source.rank, target.rank, space, parts, tokens, count.bytes, count.rows)


def _total(rank: Rank, lines: Sequence[Line]) -> Total:
    return Total(rank, sum(line.bytes for line in lines), sum(line.rows for line in lines))


def _choices(target: Layout, sources: Sequence[Layout], election: Election, room: int) -> Iterator[Choice]:
    """Where several sources hold the same; as many rooms as there are sources show all that may be elected."""
    rooms = [room, *range(len(sources))]
    sends = [[_kinds(share.sends) for share in election.shares(each)] for each in rooms]
    replicas: dict[tuple[tuple[str, str], Hashable], list[int]] = {}
    for index, source in enumerate(sources):
        for part in holdings(source, target).items():
            replicas.setdefault(part, []).append(index)
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for (kind, _), members in replicas.items():
        elected = dict.fromkeys(index for each in sends for index in members if kind in each[index])
        if len(members) > 1:
            alike.setdefault((kind[0], tuple(members), tuple(elected)), []).append(kind[1])
    for (space, all_members, (first, *others)), fields in alike.items():
        spared = [sources[index].rank for index in all_members if index != first and index not in others]
        ranks = [sources[index].rank for index in sorted(others)]
        yield Choice(target.rank, space, fields, sources[first].rank, ranks, spared)


def _kinds(sends: Mapping[str, Sequence[str]]) -> set[tuple[str, str]]:
    return {(space, field) for space, fields in sends.items() for field in fields}
