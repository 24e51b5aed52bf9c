"""Where the canary looks, and what it sees: on plain arrays, without any process's memory."""

import itertools

import numpy as np
import pytest

from kvferry.canary import (
    EVERY_BYTES,
    WINDOW_BYTES,
    Sums,
    add,
    cells,
    difference,
    look,
    no_sums,
    places,
    small_look,
    weigh,
)
from kvferry.layout import Cyclic, Field, Layout, Space, Strides, Tensor
from kvferry.plan import Size, route
from kvferry.presets import layer_major, page_major

TOKENS = 16


def make(preset=page_major, layers=2, kv_heads=2, head_dim=64, pages=40, page_tokens=TOKENS, **rest):
    return preset(
        "m", layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype="float16", pages=pages,
        page_tokens=page_tokens, **rest,
    )  # fmt: skip


def opaque(granule_bytes, pages=40):
    """One block of bytes per page that can't be cut."""
    field = Field("block", granule_bytes, "page", False, TOKENS, "packed")
    tensor = Tensor(
        "kv", (0,), (), (field,), 0, granule_bytes * pages, Strides(page=granule_bytes), granule_bytes, pages
    )
    return Layout("m", "uint8", 1, (tensor,), (Space("kv", TOKENS),))


def memory_of(layout, seed=0):
    size = max(tensor.address + tensor.nbytes for tensor in layout.tensors)
    return np.random.default_rng(seed).integers(0, 255, size + 64, np.uint8)


def sums(seen, memory, pages, first_page=0):
    found = no_sums(seen)
    for windows in seen.blocks:
        at = windows.addresses(np.asarray(pages, np.int64), first_page)
        content = np.zeros((len(windows), WINDOW_BYTES), np.uint8)
        for row, address in enumerate(at.tolist()):
            content[row, : windows.nbytes] = memory[address : address + windows.nbytes]
        add(found, seen, windows, weigh(windows, content.view(np.uint64)))
    return found


def looks(src, dst, tokens, prefix=0, full=False):
    leg = route(src, dst).leg("kv")
    return [look(leg, prefix, tokens, tokens, side, full=full) for side in (0, 1)]


def test_about_64_bytes_of_every_4096_are_looked_at():
    layout = make(pages=70)
    _, seen = looks(layout, layout, 64 * TOKENS)
    moved = 64 * memory_of(layout).size // 70
    looked_at = sum(windows.nbytes * len(windows) for windows in seen.blocks)
    assert 0.9 < looked_at * EVERY_BYTES / WINDOW_BYTES / moved < 1.1


def test_every_element_is_looked_at_however_short_the_request():
    layout = make(layers=3, kv_heads=4)
    _, seen = looks(layout, layout, 1)
    (windows,) = seen.blocks
    assert len(windows) == 3 * 4 * 2, "K and V of each head of each layer"
    assert seen.layers.tolist() == [0, 1, 2]
    assert (seen.first_page, seen.pages) == (0, 1)


def test_neighbouring_layers_and_heads_are_looked_at_at_different_tokens():
    layout = make(layers=8, kv_heads=8)
    _, seen = looks(layout, layout, 20 * TOKENS)
    (windows,) = seen.blocks
    first = windows.there.reshape(128, -1)[:, 0]
    assert len(np.unique(first)) > 1


@pytest.mark.parametrize("granule_bytes", [16, 64, 100, 4096, 4100, 65536])
@pytest.mark.parametrize("full", [False, True])
def test_windows_lie_inside_of_their_granule(granule_bytes, full):
    layout = opaque(granule_bytes)
    _, seen = looks(layout, layout, 5 * TOKENS, full=full)
    covered = np.zeros(40 * granule_bytes, int)
    for windows in seen.blocks:
        at = windows.addresses(np.arange(7, 12), 0)
        assert (at // granule_bytes == (at + windows.nbytes - 1) // granule_bytes).all()
        for address in at.tolist():
            covered[address : address + windows.nbytes] += 1
    assert covered[: 7 * granule_bytes].sum() == covered[12 * granule_bytes :].sum() == 0
    if full:
        assert (covered[7 * granule_bytes : 12 * granule_bytes] == 1).all()
    else:
        assert covered.sum() >= min(64, granule_bytes)


@pytest.mark.parametrize("full", [False, True])
def test_blocks_of_windows_are_the_same_windows(monkeypatch, full):
    layout = make(layers=3)
    whole = looks(layout, layout, 20 * TOKENS, full=full)[1]
    keys = np.sort(np.concatenate([windows.key for windows in whole.blocks]))
    monkeypatch.setattr(places, "BLOCK_WINDOWS", 7)
    parts = looks(layout, layout, 20 * TOKENS, full=full)[1]
    blocks = list(parts.blocks)
    assert len(blocks) > 5
    assert np.sort(np.concatenate([windows.key for windows in blocks])).tolist() == keys.tolist()


def test_a_share_is_a_part_of_the_windows():
    layout = make()
    (windows,) = looks(layout, layout, 9 * TOKENS)[1].blocks
    keys = np.concatenate([windows.share(number, 3).key for number in range(3)])
    assert keys.tolist() == windows.key.tolist()


def test_both_sides_come_to_the_same_sums_through_other_layouts_and_pages():
    ours, theirs = make(page_major, order="nhd"), make(layer_major, page_tokens=8, pages=90)
    tokens, src_pages, dst_pages = 50, [3, 9, 1, 7], [5, 80, 2, 33, 4, 61, 7]
    source, target = memory_of(ours, 1), memory_of(theirs, 2)
    leg = route(ours, theirs).leg("kv")
    pattern = leg.pattern(0, tokens, tokens)
    at, to = pattern.addresses(0, np.array(src_pages), 0), pattern.addresses(1, np.array(dst_pages), 0)
    for src, dst, nbytes in zip(at.tolist(), to.tolist(), pattern.nbytes.tolist(), strict=True):
        target[dst : dst + nbytes] = source[src : src + nbytes]
    here, there = looks(ours, theirs, tokens)
    sent, landed = sums(here, source, src_pages), sums(there, target, dst_pages)
    assert [each.tolist() for each in sent] == [each.tolist() for each in landed]
    assert difference("kv", there, landed, sent, dst_pages) == ""


@pytest.mark.parametrize("damage", ["exchanged pages", "a page of another request", "exchanged heads", "a stale layer"])
def test_what_other_connectors_let_through_is_seen_and_named(damage):
    layout = make(layers=4, kv_heads=4, pages=8)
    memory = memory_of(layout)
    pages = [2, 5, 1]
    _, seen = looks(layout, layout, 3 * TOKENS)
    sent = sums(seen, memory, pages)
    block = memory[:-64].view(np.uint16).reshape(8, 4, 2, 4, TOKENS, 64)
    if damage == "exchanged pages":
        block[[2, 5]] = block[[5, 2]]
    elif damage == "a page of another request":
        block[5] = block[7]
    elif damage == "exchanged heads":
        block[[2, 5, 1], :, :, :2] = block[[2, 5, 1], :, :, :2][:, :, :, ::-1]
    else:
        block[[2, 5, 1], 3] = 0
    text = difference("kv", seen, sums(seen, memory, pages), sent, pages)
    expected = {
        "exchanged pages": "layers 0, 1, 2, 3, pages 0 (page 2 of the pool), 1 (page 5 of the pool) of the request",
        "a page of another request": "layers 0, 1, 2, 3, page 1 (page 5 of the pool) of the request",
        "exchanged heads": "layers 0, 1, 2, 3, pages 0 (page 2 of the pool), 1 (page 5 of the pool), 2 (page 1 of",
        "a stale layer": "layer 3, pages 0 (page 2 of the pool), 1 (page 5 of the pool), 2 (page 1 of the pool) of",
    }[damage]
    assert text.startswith(f"space 'kv': {expected}")


def test_many_differences_are_counted_not_listed():
    layout = make(layers=9, pages=12)
    _, seen = looks(layout, layout, 8 * TOKENS)
    zero = no_sums(seen)
    text = difference("kv", seen, zero, Sums(zero.layers + 1, zero.pages + 1), list(range(8)))
    assert "layers 0, 1, 2, 3 and 5 more" in text
    assert "3 (page 3 of the pool) and 4 more of the request" in text


def test_a_digest_of_another_shape_is_a_difference():
    layout = make()
    _, seen = looks(layout, layout, 2 * TOKENS)
    zero = no_sums(seen)
    short = Sums(zero.layers[:0], zero.pages)
    assert "of 0 layers and 2 pages, that of what landed of 2 and 2" in difference("kv", seen, zero, short, [1, 2])


def test_cells_group_the_windows_by_layer_and_page():
    layout = make(layers=3)
    _, seen = looks(layout, layout, 40, full=True)
    (windows,) = seen.blocks
    order, begins = cells(windows, seen)
    assert sorted(order.tolist()) == list(range(len(windows)))
    assert len(begins) == 3 * 3 + 1
    for low, high in itertools.pairwise(begins.tolist()):
        some = order[low:high]
        assert len({(windows.layer[at], windows.there[at]) for at in some.tolist()}) == 1


def test_where_nothing_moves_nothing_is_looked_at():
    layout = make()
    leg = route(make(deal=Cyclic(TOKENS, 2, 1)), layout).leg("kv")
    seen = look(leg, 0, 3, 3, 1, full=False)
    assert (seen.pages, list(seen.blocks)) == (0, [])
    assert no_sums(seen).pages.tolist() == []


def test_the_windows_of_a_small_request_are_made_once_for_all_of_its_size():
    leg = route(make(), make(layer_major, page_tokens=8, pages=90)).leg("kv")
    seen, first_page = small_look(leg, Size(0, 16, 40, 0), 1)
    assert small_look(leg, Size(0, 16, 40, 0), 1)[0] is seen
    assert first_page == 2
    assert small_look(leg, Size(0, 16, 40, 0), 0) is not None
    plain = look(leg, 16, 40, 40, 1, full=False)
    assert [windows.key.tolist() for windows in seen.blocks] == [windows.key.tolist() for windows in plain.blocks]
    assert small_look(leg, Size(0, 40, 40, 0), 1) is None
