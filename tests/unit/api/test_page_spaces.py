"""Page lists of spaces that share a pool are looked at together: a page is one space's at a time."""

import numpy as np
import pytest

from kvferry.api.held import HeldPages
from kvferry.api.indices import PageSpaces, repeated
from kvferry.errors import InputError
from kvferry.layout import Field, Layout, Space, Strides, Tensor
from kvferry.node.view import RoomView

FIELD = Field("k", 8, headed=False)


def tensor(space, address):
    return Tensor(space, (0,), (), (FIELD,), address, 256, Strides(0, 32, 8, 0), 32, 8)


def spaces(*tensors):
    names = ("kv", "swa", "elsewhere")
    return PageSpaces(Layout("m", "bf16", 0, tensors, tuple(Space(name, 4) for name in names)), "decode")


def test_spaces_with_memory_of_their_own_have_a_pool_each():
    apart = spaces(tensor("kv", 4096), tensor("swa", 8192))
    assert apart.pools == {"kv": 8, "swa": 8}
    found = apart.by_pool(apart.lists([1, 2], {"swa": [2], "elsewhere": [9]}))
    assert {pool: pages.tolist() for pool, pages in found.items()} == {"kv": [1, 2], "swa": [2]}


def test_spaces_on_the_same_memory_have_one():
    shared = spaces(tensor("kv", 4096), tensor("swa", 4096))
    assert shared.pools == {"kv+swa": 8}
    found = shared.by_pool(shared.lists([1, 2], {"swa": [2]}))
    assert found["kv+swa"].tolist() == [1, 2, 2]
    assert repeated(found["kv+swa"]) == 2


def test_a_page_of_a_live_room_is_not_given_to_another_space():
    shared = spaces(tensor("kv", 4096), tensor("swa", 4096))
    held = HeldPages(shared.pools)
    held.take(RoomView(1), shared.by_pool(shared.lists([1, 2], {"swa": [3]})))
    with pytest.raises(InputError, match=r"decode room 2: page 2 of space 'kv\+swa' was named for room 1"):
        held.take(RoomView(2), shared.by_pool(shared.lists([4], {"swa": [2]})))
    with pytest.raises(InputError, match=r"decode room 3: page 5 of space 'kv\+swa' is named 2 times"):
        held.take(RoomView(3), shared.by_pool(shared.lists([5], {"swa": np.array([5])})))
