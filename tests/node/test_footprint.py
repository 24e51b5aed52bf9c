"""What a grant allows: every byte of the room's pages that carries payload, and not one more."""

import numpy as np
import pytest

from kvferry.layout import Cyclic, Field, Layout, Rows, Space, Strides, Tensor, bind
from kvferry.node.footprint import footprint
from kvferry.presets import layer_major, page_major

BASE = 1 << 20
SHAPE = {"layers": 3, "kv_heads": 2, "head_dim": 4, "dtype": "float16", "pages": 6, "page_tokens": 4}


def covered(layout, pages):
    starts, ends = footprint(layout, pages)
    marks = np.zeros(1 << 16, bool)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        assert not marks[start - BASE : end - BASE].any(), "parts overlap"
        marks[start - BASE : end - BASE] = True
    return marks


def by_hand(layout, pages):
    """Cell by cell, from the declaration."""
    marks = np.zeros(1 << 16, bool)
    sizes = {space.name: space.page_tokens for space in layout.spaces}
    for tensor in layout.tensors:
        nbytes = sum(field.nbytes for field in tensor.fields)
        granule = tensor.fields[0].granule_tokens if tensor.fields[0].per == "token" else sizes[tensor.space]
        heads = sum(high - low for low, high in tensor.heads) or 1
        strides = tensor.strides_bytes
        for page in pages.get(tensor.space, ()):
            for layer in range(len(tensor.layers)):
                for token in range(sizes[tensor.space] // granule):
                    for head in range(heads):
                        at = tensor.address - BASE + layer * strides.layer + page * strides.page
                        at += token * strides.token + head * strides.head
                        marks[at : at + nbytes] = True
    return marks


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize("preset", [page_major, layer_major])
def test_pages_of_the_presets(preset, order):
    layout = preset("toy", **SHAPE, order=order)
    size = max(tensor.address + tensor.nbytes for tensor in layout.tensors)
    bound = bind(layout, [(BASE, size)])
    pages = {"kv": np.array([4, 0, 1])}
    assert (covered(bound, pages) == by_hand(bound, pages)).all()


def test_padding_between_heads_tokens_and_pages_is_left_out():
    strides = Strides(layer=2048, page=512, token=48, head=16)
    tensor = Tensor("kv", (0, 1), ((0, 2),), (Field("k", 12),), BASE, 4096, strides, 96, 4)
    layout = Layout("toy", "float16", 2, (tensor,), (Space("kv", 4, Cyclic()),))
    pages = {"kv": np.array([3, 1])}
    marks = covered(layout, pages)
    assert (marks == by_hand(layout, pages)).all()
    assert marks.sum() == 2 * 2 * 4 * 2 * 12


def test_fields_without_heads_and_per_page_and_spaces_that_are_not_named():
    scale = Tensor("kv", (0,), (), (Field("scale", 8, per="page", headed=False),), BASE, 400, Strides(page=100), 8, 4)
    state = Tensor(
        "mamba", (0,), (), (Field("conv", 6, headed=False),), BASE + 1000, 40, Strides(page=10, token=6), 6, 4
    )
    spaces = (Space("kv", 4), Space("mamba", 1, coverage=Rows()))
    layout = Layout("toy", "float16", 0, (scale, state), spaces)
    assert np.flatnonzero(covered(layout, {"kv": np.array([2])})).tolist() == list(range(200, 208))
    rows = np.flatnonzero(covered(layout, {"mamba": np.array([3])})).tolist()
    assert rows == list(range(1030, 1036))


def test_no_pages_are_no_memory():
    layout = bind(page_major("toy", **SHAPE), [(BASE, 1 << 15)])
    starts, ends = footprint(layout, {})
    assert len(starts) == len(ends) == 0
    assert starts.dtype == ends.dtype == np.uint64
