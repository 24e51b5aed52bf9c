"""bind puts the tensors of a layout into memory."""

import pytest

from kvferry.errors import LayoutError
from kvferry.layout import bind
from kvferry.presets import layer_major

SHAPE = {"layers": 3, "kv_heads": 2, "head_dim": 4, "dtype": "float16", "pages": 5, "page_tokens": 4}


def test_bind_takes_one_buffer_for_all_tensors_at_their_offsets():
    unbound = layer_major("m", **SHAPE)
    bound = bind(unbound, [(1 << 20, 6 * 320)])
    assert [t.address for t in bound.tensors] == [(1 << 20) + 320 * i for i in range(6)]


def test_bind_takes_one_buffer_for_each_tensor():
    buffers = [((i + 1) << 20, 320) for i in range(6)]
    assert [t.address for t in bind(layer_major("m", **SHAPE), buffers).tensors] == [a for a, _ in buffers]


def test_bind_refuses_another_number_of_buffers():
    with pytest.raises(LayoutError, match="2 buffers for 6 tensors"):
        bind(layer_major("m", **SHAPE), [(1 << 20, 9999)] * 2)


def test_bind_refuses_a_buffer_that_is_too_short():
    with pytest.raises(LayoutError, match=r"tensor 5 needs 1600 \+ 320 bytes, its buffer has 1919"):
        bind(layer_major("m", **SHAPE), [(1 << 20, 1919)])
