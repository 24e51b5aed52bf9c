"""Random pairs of sides, copied by the planner's batches and compared with the oracle, every byte."""

from __future__ import annotations

import ctypes
import itertools
import sys
from dataclasses import dataclass
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.canary import difference, look
from kvferry.ids import Rank
from kvferry.layout import (
    All,
    Cyclic,
    Field,
    Layout,
    Ranges,
    Rows,
    Slot,
    Space,
    Strides,
    Tensor,
    Window,
    covers,
    extent,
    first_slot,
    num_pages,
    supports,
    validate,
)  # fmt: skip
from kvferry.node.digests import Place
from kvferry.node.memory_reader import read_many
from kvferry.plan import Election, Limits, PageList, Part, Size, batches, fan_in, route, runs, small_batch, small_target
from kvferry.plan.small import RECIPE_ROWS
from kvferry.presets import layer_major, page_major
from kvferry.testing.oracle import Memory, cells, copy_batches, pages_of

TOKENS = (1, 15, 16, 17, 130)


@dataclass(frozen=True)
class Model:
    """What both sides agree on."""

    layers: int
    draft: int
    kv_heads: int
    heads: dict[str, int]
    fields: dict[str, list[Field]]
    coverage: dict[str, All | Window | Slot | Rows]
    page_choices: tuple[int, ...]
    unit: int
    rows_of: int
    draft_bytes: int


def element(name, nbytes, granule=1, **rest):
    return Field(name, nbytes, per="token", granule_tokens=granule, **rest)


@st.composite
def models(draw):
    """A model: MHA, GQA or latent cache, with scales and granules, window, state and row spaces."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    granule = draw(st.sampled_from([1, 1, 4]))
    if draw(st.booleans()):
        kv = [element("k", draw(st.integers(1, 9))), element("v", draw(st.integers(1, 9)))]
    else:
        kv = [element("latent", draw(st.integers(1, 17)), headed=False)]
    if granule > 1:
        kv.append(element("scale", 3, granule, headed=draw(st.booleans()), format="block"))
    fields, coverage = {"kv": kv}, {"kv": All()}
    if draw(st.integers(0, 3)) == 0:
        fields["swa"], coverage["swa"] = [element("k", 5)], Window(draw(st.sampled_from([1, 8, 33])))
    if draw(st.integers(0, 3)) == 0:
        names = draw(st.sampled_from([["ssm"], ["conv_q", "conv_v", "ssm"]]))
        headed = draw(st.booleans())
        fields["mamba"] = [Field(name, 3 + len(name), per="request", headed=headed) for name in names]
        coverage["mamba"] = Slot()
    if draw(st.integers(0, 3)) == 0:
        fields["index"], coverage["index"] = [element("row", 6, headed=draw(st.booleans()))], Rows()
    choices = (4, 8, 16) if granule > 1 else (1, 3, 8, 16)
    layers, draft = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([0, 0, 1]))
    heads = {"conv_q": draw(st.integers(1, 3)), "conv_v": draw(st.integers(1, 5))}  # groups are sharded on their own
    rows_of = draw(st.sampled_from([1, 4]))
    draft_bytes = draw(st.sampled_from([0, 3]))  # draft layers may be wider
    return Model(layers, draft, kv_heads, heads, fields, coverage, choices, granule, rows_of, draft_bytes)


@st.composite
def deals(draw, model, page_tokens, ranks):
    """One deal per CP rank."""
    unit = model.unit * draw(st.sampled_from([1, 2])) if draw(st.booleans()) else page_tokens
    kind = draw(st.sampled_from(["cyclic", "contiguous", "zigzag"]))
    if kind == "cyclic":
        return [Cyclic(unit, ranks, r) for r in range(ranks)]
    if kind == "contiguous":
        return [Ranges(ranks, (r,), unit) for r in range(ranks)]
    return [Ranges(2 * ranks, (r, 2 * ranks - 1 - r), unit) for r in range(ranks)]


def head_intervals(kv_heads, tp, rank, shuffled):
    """Heads of a TP rank: an even cut, replicas where there are more ranks than heads."""
    if tp >= kv_heads:
        return ((rank * kv_heads // tp, rank * kv_heads // tp + 1),)
    h0, h1 = rank * kv_heads // tp, (rank + 1) * kv_heads // tp
    middle = (h0 + h1) // 2
    return ((middle, h1), (h0, middle)) if shuffled and h0 < middle else ((h0, h1),)


@st.composite
def strided(draw, counts, cell):
    """Strides for axes of these counts, in any order, with padding; and the length of the block."""
    reach, strides = cell, {}
    for axis in draw(st.permutations(["token", "head", "layer", "page"])):
        strides[axis] = reach + draw(st.sampled_from([0, 0, 0, 5]))
        reach = strides[axis] * (counts[axis] - 1) + reach if counts[axis] > 1 else reach
    return Strides(**strides), reach


@st.composite
def arrangements(draw, model):
    """How one side arranges its memory, and which layers it has: the same for all of its ranks."""
    choices = st.sampled_from(model.page_choices)
    pages = {
        name: model.rows_of if isinstance(cover, Rows) else 1 if isinstance(cover, Slot) else draw(choices)
        for name, cover in model.coverage.items()
    }
    return {
        "page_tokens": pages,
        "fused": draw(st.booleans()),
        "per_layer": draw(st.booleans()),
        "shuffled": draw(st.booleans()),
        "layers": model.layers + draw(st.integers(0, model.draft)),
    }


@st.composite
def rank_layouts(draw, model, side, rank, tp, pp, deal):
    """The layout of one rank of a side."""
    stages = np.array_split(np.arange(side["layers"]), pp)
    layers = tuple(int(layer) for layer in stages[rank.pp])
    spaces, tensors, at = [], [], 0
    for name, fields in model.fields.items():
        page_tokens = side["page_tokens"][name]
        whole = isinstance(model.coverage[name], Slot | Rows)
        spaces.append(Space(name, page_tokens, Cyclic() if whole else deal, model.coverage[name]))
        shapes = itertools.groupby(fields, lambda f: (f.headed, f.granule_tokens, model.heads.get(f.name)))
        groups = [list(group) for _, group in shapes]
        if not side["fused"]:
            groups = [[item] for group in groups for item in group]
        split = [tuple(layer for layer in layers if (layer < model.layers) == main) for main in (True, False)]
        stacks = [(layer,) for layer in layers] if side["per_layer"] else [ids for ids in split if ids]
        for cells_of, ids in itertools.product(groups, stacks):
            more = model.draft_bytes if ids[0] >= model.layers else 0
            group = [msgspec.structs.replace(item, nbytes=item.nbytes + more) for item in cells_of]
            total = model.heads.get(group[0].name, model.kv_heads)
            heads = head_intervals(total, tp, rank.tp, side["shuffled"]) if group[0].headed else ()
            count = sum(h1 - h0 for h0, h1 in heads) or 1
            granules = page_tokens // group[0].granule_tokens
            pool = 3 + 140 // page_tokens
            cell = sum(item.nbytes for item in group)
            counts = {"layer": len(ids), "page": pool, "token": granules, "head": count}
            strides, nbytes = draw(strided(counts, cell))
            item = cell * granules * count
            tensor = Tensor(name, ids, heads, tuple(group), at, nbytes, strides, item, pool)
            tensors.append(msgspec.structs.replace(tensor, optional=ids[0] >= model.layers))
            at += nbytes + draw(st.sampled_from([0, 0, 16]))
    return Layout("m", "bf16", model.kv_heads, tuple(tensors), tuple(spaces), rank, 8)


@st.composite
def sides(draw, model):
    """All ranks of a side."""
    tp, pp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, min(2, model.layers)))
    cp = draw(st.sampled_from([1, 1, 2, 3]))
    side = draw(arrangements(model))
    dealt = draw(deals(model, side["page_tokens"]["kv"], cp))
    grid = [Rank(0, p, c, t) for p in range(pp) for c in range(cp) for t in range(tp)]
    return [draw(rank_layouts(model, side, rank, tp, pp, dealt[rank.cp])) for rank in grid]


@st.composite
def page_lists(draw, layout, first_token, num_tokens, rows):
    """A page list per space: distinct pages of the pool, scattered or in order."""
    lists = {}
    for space in layout.spaces:
        pool = min((t.pages for t in layout.tensors if t.space == space.name), default=200)
        logical = pages_of(space, first_token, num_tokens, rows)
        assert num_pages(space, first_token, num_tokens, rows) == len(logical)
        scattered = np.random.default_rng(draw(st.integers(0, 99))).permutation(pool)
        chosen = np.sort(scattered[: len(logical)]) if draw(st.booleans()) else scattered[: len(logical)]
        first = logical[0] * space.page_tokens if logical else 0
        if logical:
            lo, _ = extent(space, first_token, num_tokens, rows)
            assert first_slot(space, lo, num_tokens) == first
        lists[space.name] = PageList(chosen.astype(np.int32), first)
    return lists


def chunks_of(pages, page_tokens, size):
    for start in range(0, len(pages.indices), size):
        yield PageList(pages.indices[start : start + size], pages.first_slot + start * page_tokens)


def transfer(source, target, sends, src_pages, dst_pages, request, first_token, chunk_pages, limits):
    """Send everything in chunks, as a sender does; returns the bytes."""
    prefix, num_tokens, rows = request
    whole, total = route(source.layout, target.layout), 0
    path = whole.only(sends)
    for name in path.spaces:
        for chunk in chunks_of(src_pages[name], path.leg(name).src.page_tokens, chunk_pages):
            part = runs(path, Part(name, prefix, num_tokens, chunk, dst_pages[name], rows))
            sent = list(batches(path, [part], limits))
            assert all(len(b) <= limits.rows and b.total_bytes <= limits.bytes for b in sent)
            assert all(int(b.nbytes.sum()) == b.total_bytes for b in sent)
            total += copy_batches(sent)
    assert total == whole.request_bytes(prefix, num_tokens, dict.fromkeys(whole.spaces, rows), sends)
    for name in path.spaces:
        # what covers the whole request is never refused as too short
        part = Part(name, prefix, num_tokens, src_pages[name], dst_pages[name], rows, is_whole=True)
        check_pattern(path, part, first_token)
        check_canary(path, name, src_pages[name], dst_pages[name], request)
    return total


def byte_pairs(batch):
    """Every byte of a batch, as (destination, source)."""
    pairs = zip(batch.src.tolist(), batch.dst.tolist(), batch.nbytes.tolist(), strict=True)
    return sorted((dst + i, src + i) for src, dst, nbytes in pairs for i in range(nbytes))


def check_pattern(path, part, first_token):
    """The pattern of a request's size gives the bytes that the general way gives, its rows joined or not."""
    general = list(batches(path, [runs(path, part)], Limits()))
    for worth in (sys.maxsize, 0):
        with mock.patch("kvferry.plan.small.SMALL_BYTES", worth):
            check_rows(path, part, first_token, general)


def check_rows(path, part, first_token, general):
    space, prefix, num_tokens, src, dst, rows, _ = part
    here, there = ({space: np.asarray(each.indices, np.int64)} for each in (src, dst))
    target = small_target(path, {space: Size(first_token, prefix, num_tokens, rows)}, there)
    batch = target and small_batch(target, here)
    if batch is None:
        leg = path.leg(space)
        many = leg.most_rows(*leg.extent(prefix, num_tokens, rows), num_tokens) > RECIPE_ROWS
        assert many or not general, "a request with bytes has a pattern, unless its rows are many"
    else:
        assert byte_pairs(batch) == sorted(pair for each in general for pair in byte_pairs(each))
        assert batch.total_bytes == sum(each.total_bytes for each in general)


def check_canary(path, name, src_pages, dst_pages, request):
    """Both sides' digests are equal; of every byte, one that is changed is seen, and its layer and page named."""
    prefix, num_tokens, rows = request
    leg = path.leg(name)
    lo, hi = leg.extent(prefix, num_tokens, rows)
    for full in (False, True):
        looks = [look(leg, lo, hi, num_tokens, side, full=full) for side in (0, 1)]
        firsts = [
            given.first_slot // tokens for given, tokens in zip((src_pages, dst_pages), leg.page_tokens, strict=True)
        ]
        ours, theirs = (
            Place(name, seen, np.asarray(given.indices, np.int64), first)
            for seen, given, first in zip(looks, (src_pages, dst_pages), firsts, strict=True)
        )
        sent, landed = ours.sums(read_many, full=full), theirs.sums(read_many, full=full)
        assert sent.layers.tolist() == landed.layers.tolist()
        assert sent.pages.tolist() == landed.pages.tolist()
        for windows in theirs.seen.blocks:
            at = int(windows.addresses(theirs.pages, theirs.first_page)[len(windows) // 2])
            byte = ctypes.c_uint8.from_address(at)
            byte.value ^= 0x10
            seen = theirs.sums(read_many, full=full)
            byte.value ^= 0x10
            text = difference(
                name, theirs.seen, seen, sent, theirs.pages[theirs.seen.first_page - firsts[1] :].tolist()
            )
            layer, page = windows.layer[len(windows) // 2], windows.there[len(windows) // 2] - theirs.seen.first_page
            pool = int(theirs.pages[page + theirs.seen.first_page - firsts[1]])
            expected = f"layer {theirs.seen.layers[layer]}, page {page} (page {pool} of the pool) of the request"
            assert text == f"space {name!r}: {expected}"


def check_side(sources, dst, group, draw, request, first_token, chunk_pages, limits):
    prefix, num_tokens, rows = request
    for side, layout in [("decode", dst), *(("prefill", source) for source in sources)]:
        validate(layout, side)
    target = Memory(dst)
    validate(target.layout, "decode", bound=True)
    dst_pages = draw(page_lists(dst, prefix, num_tokens, rows))
    wanted = cells(target.layout, dst_pages, prefix, num_tokens, rows)
    assert covers(sources, dst) == ""
    shares = Election(dst, sources, group).shares(draw(st.integers(0, 7)))
    written = set()
    for layout, share in zip(sources, shares, strict=True):
        assert supports(layout, dst).reason == ""
        assert fan_in(layout, [dst]) == share.involved
        assert route(layout, dst).is_empty != share.involved
        if not share.sends:
            continue
        source = Memory(layout)
        src_pages = draw(page_lists(layout, first_token, num_tokens, rows))
        held = cells(source.layout, src_pages, first_token, num_tokens, rows)
        source.fill(held)
        sent = [key for key in held if key in wanted and key[2] in share.sends.get(key[0], ())]
        assert not written.intersection(sent), "each byte once"
        written.update(sent)
        target.expect(wanted, sent)
        transfer(source, target, share.sends, src_pages, dst_pages, request, first_token, chunk_pages, limits)
        assert source.differences(held) == ""
    assert not [key for key in wanted.keys() - written if is_needed(dst, key, num_tokens)]
    assert target.differences(wanted) == ""


def is_needed(layout, key, num_tokens):
    """Draft layers may be missing, and what is kept below a window only because a page begins there."""
    space, layer = key[0], key[1]
    if any(tensor.optional and layer in tensor.layers for tensor in layout.tensors):
        return False
    coverage = next(each.coverage for each in layout.spaces if each.name == space)
    return not isinstance(coverage, Window) or key[4] >= num_tokens - coverage.tokens


@st.composite
def requests(draw, granule):
    num_tokens = draw(st.sampled_from(TOKENS))
    prefix = draw(st.integers(0, num_tokens)) if draw(st.booleans()) else 0
    return prefix - prefix % granule, num_tokens, draw(st.integers(0, 5))


@given(st.data())
def test_all_elected_sources_together_write_exactly_what_the_oracle_expects(data):
    model = data.draw(models())
    sources, group = data.draw(sides(model)), data.draw(sides(model))
    dst = data.draw(st.sampled_from(group))
    request = data.draw(requests(model.unit))
    first_token = data.draw(st.integers(0, request[0]))
    limits = Limits(data.draw(st.sampled_from([1, 7, 4096])), data.draw(st.sampled_from([4, 100, 1 << 20])))
    chunk_pages = data.draw(st.sampled_from([1, 3, 1000]))
    check_side(sources, dst, group, data.draw, request, first_token, chunk_pages, limits)


def arranged(preset, order, page_tokens, heads=None):
    return preset(
        "m", layers=2, kv_heads=2, head_dim=2, dtype="bfloat16", pages=4 + 50 // page_tokens,
        page_tokens=page_tokens, order=order, heads=heads,
    )  # fmt: skip


ARRANGEMENTS = list(itertools.product([page_major, layer_major], ["hnd", "nhd"], [1, 8, 16]))


@pytest.mark.parametrize("ours", ARRANGEMENTS)
@pytest.mark.parametrize("theirs", ARRANGEMENTS)
@given(st.data())
@settings(max_examples=2)
def test_presets_of_any_order_and_page_size_exchange_their_cache(ours, theirs, data):
    whole, dst = arranged(*ours), arranged(*theirs, data.draw(st.sampled_from([None, (1, 2)])))
    check_side([whole], dst, [dst], data.draw, (data.draw(st.sampled_from([0, 3])), 41, 0), 0, 1000, Limits())


def test_the_oracle_cuts_a_request_by_its_tokens_however_many_rows_there_are():
    space = Space("kv", 2, Ranges(3, (1,)))
    assert pages_of(space, 0, 2, 0) == pages_of(space, 0, 2, 4) == [0], "token 1 of 0 and 1"
    assert pages_of(Space("index", 1, Cyclic(), Rows()), 0, 2, 4) == [0, 1, 2, 3]
    assert pages_of(Space("state", 1, Cyclic(), Slot()), 0, 0, 0) == [0]


def test_the_oracle_sees_a_missing_row_and_a_byte_outside_the_pages():
    layout = page_major("m", layers=1, kv_heads=1, head_dim=4, dtype="uint8", pages=2, page_tokens=4)
    source, target = Memory(layout), Memory(layout)
    pages = {"kv": PageList(np.array([1]), 0)}
    held, wanted = (cells(memory.layout, pages, 0, 4) for memory in (source, target))
    source.fill(held)
    target.expect(wanted, held)
    path = route(source.layout, target.layout)
    (batch,) = batches(path, [runs(path, Part("kv", 0, 4, pages["kv"], pages["kv"]))], Limits())
    assert "element ('kv', 0, 'k', 0, 0)" in target.differences(wanted)
    assert copy_batches([batch]) == 32
    assert target.differences(wanted) == ""
    target.buffer[3] = 0
    assert "1 bytes differ, first at byte 3 of 192 (element None)" in target.differences(wanted)
