"""A model's request between two grids, as `kvferry bench transfer --model` is told of it, made to fit the memory."""

from __future__ import annotations

from functools import cache

import msgspec

from kvferry.bench.geometry import pool_bytes_of
from kvferry.bench.positions import Held, first_kept, held, page_count
from kvferry.errors import ConfigError, InputError
from kvferry.free_memory import free_memory
from kvferry.ids import Rank
from kvferry.layout import Layout, Space, covers, supports
from kvferry.presets import Grid, ModelShape, find_model, parse_grid
from kvferry.presets.grid import layout_of

MAX_TOKENS = 1 << 20
MAX_RANKS = 64
"""Of one side, all in one process."""
_FEWEST_TOKENS = 256
"""Below that layers are left out rather than more tokens: a short request says little about a long one."""


class ModelCase(msgspec.Struct, frozen=True, kw_only=True):
    """What moves, after it was scaled down where memory is short.

    Attributes:
        model: name of a preset.
        prefill, decode: the grids, as words.
        tokens: tokens of each request.
        layers: layers of the model that are moved, from the first on.
        tokens_asked: tokens that were asked for.
        model_layers: layers that the model has.
        nbytes: bytes that travel in one round, all requests in flight together.
        memory_bytes: bytes that both processes allocate.
        ranks: ranks of each side.
    """

    model: str
    prefill: str
    decode: str
    tokens: int
    layers: int
    tokens_asked: int
    model_layers: int
    nbytes: int = 0
    memory_bytes: int = 0
    ranks: dict[str, int] = {}

    @property
    def is_scaled(self) -> bool:
        """Whether less moves than was asked for."""
        return (self.tokens, self.layers) != (self.tokens_asked, self.model_layers)

    def grid(self, side: str) -> Grid:
        """A side's grid."""
        return parse_grid(self.prefill if side == "prefill" else self.decode)

    def shape(self) -> ModelShape:
        """The model, as many layers of it as are moved; the draft layers go with the last one."""
        whole = find_model(self.model)
        if self.layers == whole.layers:
            return whole
        blocks = [
            msgspec.structs.replace(block, layers=tuple(layer for layer in block.layers if layer < self.layers))
            for block in whole.blocks
        ]
        return msgspec.structs.replace(whole, blocks=tuple(block for block in blocks if block.layers))


def fitted(model: str, tokens: int, prefill: str, decode: str, inflight: int = 1) -> ModelCase:
    """A case that fits the memory: as asked for, else with fewer tokens, else with fewer layers too.

    Raises:
        InputError: numbers out of bounds, an unknown model, a grid that is none, sides that do not fit each other, or
            too little memory even for one layer.
    """
    if not 1 <= tokens <= MAX_TOKENS:
        raise InputError(f"--tokens {tokens} is not between 1 and {MAX_TOKENS}")
    layers = find_model(model).layers
    case = ModelCase(
        model=find_model(model).name, prefill=prefill, decode=decode, tokens=tokens, layers=layers, tokens_asked=tokens,
        model_layers=layers,
    )  # fmt: skip
    for side in ("prefill", "decode"):
        _check_side(case, side, inflight)
    free = free_memory()
    limit = None if free is None else free.nbytes - free.nbytes // 10
    case = measured(case, inflight)
    _check_fit(case, inflight)
    while limit is not None and case.memory_bytes > limit:
        case = measured(_smaller(case, limit), inflight)
    return case


def measured(case: ModelCase, inflight: int) -> ModelCase:
    """The case with its numbers of bytes and ranks."""
    nbytes = inflight * sum(moved_bytes(case, layout) for layout in layouts(case, "decode", inflight))
    pools = sum(pool_bytes_of(layout) for side in ("prefill", "decode") for layout in layouts(case, side, inflight))
    ranks = {side: case.grid(side).size for side in ("prefill", "decode")}
    return msgspec.structs.replace(case, nbytes=nbytes, memory_bytes=pools + nbytes, ranks=ranks)


def layouts(case: ModelCase, side: str, inflight: int) -> list[Layout]:
    """The layout of each rank of a side, with pools for the requests and guards."""
    grid, shape = case.grid(side), case.shape()
    return [_rank_layout(shape, grid, rank, case.tokens, inflight) for rank in grid.ranks()]


def guards_of(pages: int) -> int:
    """Pages of a pool that belong to no request, beside so many that do."""
    return max(2, pages // 16)


def moved(case: ModelCase, space: Space) -> Held:
    """What a decode rank gets of a request in one space: what it holds, if prefill keeps it too."""
    found = held(space, case.tokens)
    shape, grid = case.shape(), case.grid("prefill")
    theirs = next(each for each in layout_of(shape, grid, grid.ranks()[0], 1).spaces if each.name == space.name)
    kept = found.position >= first_kept(theirs, case.tokens)
    return Held(found.position[kept], found.slot[kept])


def moved_bytes(case: ModelCase, layout: Layout) -> int:
    """Bytes that one decode rank gets of a request."""
    sources = sent_layers(case)
    count = {space.name: len(moved(case, space).slot) for space in layout.spaces}
    total = 0
    for tensor in layout.tensors:
        heads = sum(h1 - h0 for h0, h1 in tensor.heads) or 1
        for field in tensor.fields:
            layers = [layer for layer in tensor.layers if (tensor.space, field.name, layer) in sources]
            granules = -(-count[tensor.space] // field.granule_tokens)
            total += len(layers) * heads * granules * field.nbytes
    return total


def sent_layers(case: ModelCase) -> frozenset[tuple[str, str, int]]:
    """(space, field, layer) of all that prefill holds."""
    shape, grid = case.shape(), case.grid("prefill")
    return frozenset(
        (tensor.space, field.name, layer)
        for rank in grid.ranks()
        for tensor in layout_of(shape, grid, rank, 1).tensors
        for field in tensor.fields
        for layer in tensor.layers
    )


def scaled_in_words(case: ModelCase) -> str:
    """What was left out, with both numbers; "" where nothing was."""
    said = [
        f"{now:,} of {asked:,} {what}"
        for now, asked, what in ((case.tokens, case.tokens_asked, "tokens"), (case.layers, case.model_layers, "layers"))
        if now != asked
    ]
    return f"scaled down, memory is short: {' and '.join(said)}" if said else ""


@cache
def _rank_layout(shape: ModelShape, grid: Grid, rank: Rank, tokens: int, inflight: int) -> Layout:
    spaces = layout_of(shape, grid, rank, 1).spaces
    needed = {space.name: inflight * page_count(space, held(space, tokens)) for space in spaces}
    return layout_of(shape, grid, rank, {name: count + guards_of(count) for name, count in needed.items()})


def _check_side(case: ModelCase, side: str, inflight: int) -> None:
    """Refuse a grid that is none, has too many ranks or does not fit the model. Raises InputError."""
    try:
        ranks = case.grid(side).size
        if ranks > MAX_RANKS:
            raise InputError(f"{ranks} ranks are more than {MAX_RANKS}", hint="one process holds all of them")
        layouts(case, side, inflight)
    except ConfigError as error:
        raise InputError(f"--{side}: {error.message}", hint=error.hint) from None


def _check_fit(case: ModelCase, inflight: int) -> None:
    """Refuse two sides that do not fit, in the library's words. Raises InputError."""
    sources = layouts(case, "prefill", inflight)
    for target in layouts(case, "decode", inflight):
        refusals = (supports(source, target).reason for source in sources)
        if reason := next(filter(None, refusals), "") or covers(sources, target):
            raise InputError(f"--prefill and --decode do not fit: {reason}")


def _smaller(case: ModelCase, limit: int) -> ModelCase:
    """Half the tokens, or where few are left half the layers. Raises InputError where neither can be less."""
    if case.tokens > _FEWEST_TOKENS:
        return msgspec.structs.replace(case, tokens=max(_FEWEST_TOKENS, case.tokens // 2))
    layers = max(_fewest_layers(case), case.layers // 2)
    if layers < case.layers and not any(case.grid(side).stages for side in ("prefill", "decode")):
        return msgspec.structs.replace(case, layers=layers)
    raise InputError(
        f"{case.tokens} tokens, {case.layers} layers of {case.model} need {case.memory_bytes} bytes; {limit} are free",
        hint="ask for a smaller model, fewer ranks, or less --inflight",
    )


def _fewest_layers(case: ModelCase) -> int:
    """Each space has a layer, and so does each pipeline stage."""
    firsts = [min(block.layers) for block in find_model(case.model).blocks if not block.optional]
    stages = [case.grid(side).pp for side in ("prefill", "decode")]
    return max(max(firsts) + 1, *stages)
