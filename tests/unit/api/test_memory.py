"""Blocks of memory as callers give them."""

import numpy as np
import pytest

from kvferry.api.memory import block_of


@pytest.mark.parametrize("array", [np.zeros((3, 4), np.float16), np.zeros((), "V5"), np.zeros((2, 2), "complex64")])
def test_blocks_of_arrays_are_as_numpy_says(array):
    assert block_of(array, "x") == (array.ctypes.data, array.nbytes, array.shape[0] if array.ndim else 1)
