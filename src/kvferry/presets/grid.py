"""A side's parallel grid, in words ("tp=4,pp=2,page=64"), and the layout of each of its ranks."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvferry.errors import InputError
from kvferry.ids import Rank
from kvferry.layout import Cyclic, Deal, Field, Layout, Ranges, Rows, Slot, Space, Tensor
from kvferry.presets.arrange import INNER, Piece, arranged, dtype_bytes
from kvferry.presets.caches import stacked
from kvferry.presets.engine_caches import ENGINE_CACHES
from kvferry.presets.model import Block, Item, ModelShape

OUTER: dict[str, tuple[str, ...]] = {
    "layer": ("piece", "layer", "page"),
    "block": ("layer", "page", "piece"),
    "page": ("page", "layer", "piece"),
}
"""The outer axes of what is kept per token, by arrangement: "layer" is all K layers, then all V layers, "block" a
tensor per layer with K and V of a block side by side, "page" one run per page of all layers. See engine_caches for who
has which."""

STATE = ("layer", "page", "piece", "head", "token")
"""Axes of what is kept per page or request: a tensor per layer, [slot][groups side by side][heads of the group]."""

DEALS = ("contiguous", "zigzag", "page", "token")

_MOST_RANKS = 4096


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """How one side splits a model and a request.

    Attributes:
        dp: DP groups; each serves requests of its own.
        pp: pipeline stages.
        cp: context parallel ranks.
        dcp: decode context parallel ranks: `cp` with the deal "token".
        tp: tensor parallel ranks.
        page: tokens per page.
        order: "nhd" or "hnd", the axes inside a page.
        arrange: "layer", "block" or "page", the axes outside of it (see OUTER).
        deal: how CP ranks share out a request: "contiguous" or "zigzag" (ranges of tokens), "page" (page i to rank i %
            cp) or "token" (token i to rank i % cp).
        stages: layers of each pipeline stage, "12/18"; "" splits evenly, the first ones get one more.
        dtype: dtype of the cache; "" is the model's.
        draft: whether it holds the model's draft layers.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    dcp: int = 1
    tp: int = 1
    page: int = 16
    order: str = "nhd"
    arrange: str = "layer"
    deal: str = "contiguous"
    stages: str = ""
    dtype: str = ""
    draft: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "cp", "dcp", "tp", "page"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is below 1")
        for name, known in (("order", INNER), ("arrange", OUTER), ("deal", DEALS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name}={getattr(self, name)} is not known", hint=f"one of {', '.join(known)}")
        if self.cp > 1 and self.dcp > 1:
            raise InputError(
                f"cp={self.cp} and dcp={self.dcp} were both given", hint="dcp=N is cp=N,deal=token: give one of them"
            )
        if self.dcp > 1 and self.deal not in {DEALS[0], "token"}:
            raise InputError(f"dcp={self.dcp} and deal={self.deal} were both given", hint="dcp=N is cp=N,deal=token")
        if self.size * self.dp > _MOST_RANKS:
            what = f"{self.size * self.dp} ranks are more than {_MOST_RANKS}"
            raise InputError(what, hint="dp * pp * cp * dcp * tp is the number of ranks: make one of them smaller")

    @property
    def size(self) -> int:
        """Ranks of one DP group."""
        return self.pp * self.cp * self.dcp * self.tp

    def ranks(self, dp: int = 0) -> list[Rank]:
        """The ranks of one DP group."""
        counts = (self.pp, self.cp * self.dcp, self.tp)
        return [Rank(dp, p, c, t) for p in range(counts[0]) for c in range(counts[1]) for t in range(counts[2])]


def parse_grid(text: str) -> Grid:
    """Read "tp=4,pp=2,page=64"; an empty text is one rank. "cache=sglang" is the arrangement of that engine.

    Raises:
        InputError: an unknown key (the nearest known one is named), a value of another type or out of range.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(Grid)}
    values: dict[str, object] = {}
    for name, value in _words(text, [*types, "cache"]):
        read = _engine_cache(text, value) if name == "cache" else {name: _converted(text, name, value, types[name])}
        if twice := sorted(values.keys() & read.keys()):
            hint = "say each once; cache=... stands for arrange and order"
            raise InputError(f"{text!r}: {twice[0]} is given twice", hint=hint)
        values |= read
    return Grid(**values)  # type: ignore[arg-type]  # each was converted to its field's type


def _words(text: str, known: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The name=value pairs of a grid."""
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, is_pair, value = (part.strip() for part in word.partition("="))
        name = name.lower()
        if not is_pair and name in known:
            raise InputError(f"{text!r}: {name} has no value", hint=f"write {name}=value")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"name=value of {', '.join(known)}"
            raise InputError(f"{text!r}: {word!r} is not known", hint=hint)
        yield name, value.lower()


def _converted(text: str, name: str, value: str, kind: type) -> object:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        wanted = "0 or 1" if kind is bool else "a whole number"
        raise InputError(f"{text!r}: {name}={value} is not {wanted}") from None


def _engine_cache(text: str, name: str) -> dict[str, object]:
    """The arrangement of an engine."""
    if name not in ENGINE_CACHES:
        raise InputError(f"{text!r}: cache={name} is not known", hint=f"one of {', '.join(ENGINE_CACHES)}")
    return {"arrange": ENGINE_CACHES[name].arrange, "order": ENGINE_CACHES[name].order}


def deal_of(grid: Grid, rank: int) -> Deal:
    """Which of a request's tokens a CP rank holds."""
    ranks = grid.cp * grid.dcp
    if ranks == 1:
        return Cyclic()
    if grid.dcp > 1 or grid.deal == "token":
        return Cyclic(1, ranks, rank)
    if grid.deal == "page":
        return Cyclic(grid.page, ranks, rank)
    if grid.deal == "contiguous":
        return Ranges(ranks, (rank,), grid.page)
    return Ranges(2 * ranks, (rank, 2 * ranks - 1 - rank), grid.page)


def stage_layers(grid: Grid, layers: int) -> list[range]:
    """The layers of each pipeline stage.

    Raises:
        InputError: stages that do not add up, or more stages than layers.
    """
    if grid.stages:
        try:
            counts = [int(word) for word in grid.stages.split("/")]
        except ValueError:
            raise InputError(f"stages={grid.stages} is no list of numbers", hint='e.g. "12/18"') from None
        if len(counts) != grid.pp or sum(counts) != layers or min(counts) < 1:
            raise InputError(
                f"stages={grid.stages}: {len(counts)} stages of {sum(counts)} layers, but pp={grid.pp} and the model "
                f"has {layers} layers",
                hint="one number per stage, all positive",
            )
    else:
        counts = [layers // grid.pp + (stage < layers % grid.pp) for stage in range(grid.pp)]
    if min(counts) < 1:
        hint = "each stage needs a layer: make pp smaller"
        raise InputError(f"pp={grid.pp} stages for {layers} layers", hint=hint)
    begins = [sum(counts[:stage]) for stage in range(grid.pp)]
    return [range(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]


def head_interval(heads: int, tp: int, rank: int) -> tuple[int, int]:
    """The heads [h0, h1) of a TP rank: an even cut, one head on several ranks where there are more ranks than heads."""
    first = rank * heads // tp
    return first, max(first + 1, (rank + 1) * heads // tp)


def layout_of(model: ModelShape, grid: Grid, rank: Rank, pages: int | Mapping[str, int]) -> Layout:
    """The unbound layout of one rank; addresses are offsets in one buffer.

    Args:
        model: what is kept.
        grid: how it is split.
        rank: which rank of the grid.
        pages: pages of each of its pools, or of the pools of each space by its name.

    Raises:
        InputError: the grid does not fit the model.
        LayoutError: a dtype is not known.
    """
    stage = stage_layers(grid, model.layers)[rank.pp]
    spaces: dict[str, Space] = {}
    blocks: list[list[Tensor]] = []
    for block in _held(model, grid):
        spaces.setdefault(block.space, _space(block, grid, rank))
        is_here = block.optional and rank.pp == grid.pp - 1
        layers = [layer for layer in block.layers if is_here or layer in stage]
        if layers:
            count = pages if isinstance(pages, int) else pages[block.space]
            blocks.append(_tensors(model, block, grid, rank, layers, count))
    dtype = grid.dtype or model.dtype
    dtype_bytes(dtype)
    return Layout(model.name, dtype, model.kv_heads, stacked(blocks), tuple(spaces.values()), rank, model.head_dim)


def layouts_of(model: ModelShape, grid: Grid, pages: int, dp: int = 0) -> list[Layout]:
    """The layouts of all ranks of one DP group; arguments and errors as of `layout_of`."""
    return [layout_of(model, grid, rank, pages) for rank in grid.ranks(dp)]


def _held(model: ModelShape, grid: Grid) -> list[Block]:
    """The blocks that this side holds."""
    if grid.draft and not any(block.optional for block in model.blocks):
        raise InputError(f"draft=1: {model.name} has no draft layers", hint="leave draft=1 away")
    return [block for block in model.blocks if grid.draft or not block.optional]


def _space(block: Block, grid: Grid, rank: Rank) -> Space:
    if isinstance(block.coverage, Slot | Rows):
        return Space(block.space, 1, Cyclic(), block.coverage)
    return Space(block.space, grid.page, deal_of(grid, rank.cp), block.coverage)


def _tensors(
    model: ModelShape, block: Block, grid: Grid, rank: Rank, layers: Sequence[int], pages: int
) -> list[Tensor]:
    page_tokens = _space(block, grid, rank).page_tokens
    dtype = grid.dtype or model.dtype
    pieces = [_piece(item, block, item.dtype or dtype, page_tokens, grid.tp, rank.tp) for item in block.items]
    axes = (*OUTER[grid.arrange], *INNER[grid.order]) if block.per == "token" else STATE
    tensors = arranged(block.space, axes, pieces, layers, pages, page_tokens)
    return [msgspec.structs.replace(tensor, optional=block.optional) for tensor in tensors]


def _piece(item: Item, block: Block, dtype: str, page_tokens: int, tp: int, rank: int) -> Piece:
    nbytes = item.values * dtype_bytes(dtype)
    granule = page_tokens if block.per == "page" else 1
    field = Field(item.name, nbytes, block.per, headed=item.heads > 0, granule_tokens=granule, format=dtype)
    return Piece(field, head_interval(item.heads, tp, rank) if item.heads else None)
