"""Presets place bytes where the serving engines have them."""

import numpy as np
import pytest

from kvferry.errors import LayoutError
from kvferry.ids import Rank
from kvferry.layout import validate
from kvferry.plan import PageList
from kvferry.presets import layer_major, mla, page_major
from kvferry.testing.oracle import Memory, cells

SHAPE = {"layers": 3, "kv_heads": 2, "head_dim": 4, "dtype": "float16", "pages": 5, "page_tokens": 4}
PRESETS = [
    lambda **rest: page_major("m", **SHAPE, **rest),
    lambda **rest: layer_major("m", **SHAPE, **rest),
]


def array_of(memory, shape):
    size = int(np.prod(shape))
    return memory.buffer[memory.guard_bytes : memory.guard_bytes + size].reshape(shape)


def write(layout, pages, num_tokens):
    memory = Memory(layout)
    validate(memory.layout, "prefill", bound=True)
    where = cells(memory.layout, pages, 0, num_tokens)
    memory.fill(where)
    return memory, where


def bytes_at(memory, where, key):
    address, nbytes = where[key]
    at = address - memory.buffer.ctypes.data
    return memory.buffer[at : at + nbytes]


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize(
    ("preset", "outer", "place"),
    [
        pytest.param(page_major, (5, 3, 2), (2, 1, 1), id="page, layer, kv"),
        pytest.param(layer_major, (2, 3, 5), (1, 1, 2), id="all k layers, then all v layers"),
    ],
)
def test_major_axes_come_before_the_order(preset, outer, place, order):
    pages = {"kv": PageList(np.array([4, 2]), 0)}
    memory, where = write(preset("m", **SHAPE, order=order), pages, 7)
    inner = (2, 4, 8) if order == "hnd" else (4, 2, 8)
    block = array_of(memory, (*outer, *inner))
    got = block[(*place, 1, 2)] if order == "hnd" else block[(*place, 2, 1)]
    assert (got == bytes_at(memory, where, ("kv", 1, "v", 1, 6))).all()


def test_mla_has_one_latent_without_heads_per_layer():
    layout = mla("m", layers=3, latent_dim=6, dtype="float16", pages=5, page_tokens=4)
    memory, where = write(layout, {"kv": PageList(np.array([4, 2]), 0)}, 7)
    got = array_of(memory, (3, 5, 4, 12))[2, 2, 1]
    assert (got == bytes_at(memory, where, ("kv", 2, "latent", -1, 5))).all()
    (tensor,) = mla("m", layers=9, latent_dim=6, dtype="int8", pages=1, page_tokens=4, layer_ids=[7]).tensors
    assert tensor.layers == (7,)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_holds_its_heads_and_layers_only(preset):
    layout = preset(rank=Rank(pp=1, tp=1), heads=(1, 2), layer_ids=[2])
    validate(layout, "decode")
    assert {(t.layers, t.heads) for t in layout.tensors} == {((2,), ((1, 2),))}
    assert layout.rank == Rank(0, 1, 0, 1)


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(LayoutError, match=r"'float12'.*bfloat16"):
        page_major("m", **{**SHAPE, "dtype": "float12"})
