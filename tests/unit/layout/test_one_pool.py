"""Spaces whose tensors lie on the same bytes have one pool of pages."""

from kvferry.layout import Field, Layout, Space, Strides, Tensor
from kvferry.layout.one_pool import may_overlay, pool_names

FIELD = Field("k", 8, headed=False)


def tensor(space, address, layer=0, pages=4, step=32):
    return Tensor(space, (layer,), (), (FIELD,), address, 4096, Strides(0, step, 8, 0), 32, pages)


def names(*tensors):
    spaces = tuple(Space(name, 4) for name in sorted({each.space for each in tensors}))
    return pool_names(Layout("m", "bf16", 0, tensors, spaces))


def test_spaces_apart_have_a_pool_each():
    assert names(tensor("kv", 0), tensor("swa", 4096)) == {"kv": "kv", "swa": "swa"}


def test_spaces_on_the_same_bytes_have_one():
    found = names(tensor("kv", 0), tensor("swa", 0), tensor("ssm", 4096))
    assert found == {"kv": "kv+swa", "swa": "kv+swa", "ssm": "ssm"}


def test_sharing_goes_on_through_others():
    a, b, c = tensor("a", 0), tensor("b", 0), tensor("b", 4096, 1)
    assert names(a, b, c, tensor("c", 4096, 1)) == dict.fromkeys("abc", "a+b+c")


def test_what_may_lie_on_the_same_bytes():
    first = tensor("kv", 0)
    assert may_overlay(first, tensor("swa", 0))
    assert not may_overlay(first, tensor("kv", 0, 1))
    assert not may_overlay(first, tensor("swa", 8))
    assert not may_overlay(first, tensor("swa", 0, pages=5))
    assert not may_overlay(first, tensor("swa", 0, step=64))
