"""Contradicting and hostile layouts are refused, by name and with both values."""

import time

import msgspec
import numpy as np
import pytest

from kvferry.errors import LayoutError
from kvferry.ids import Rank
from kvferry.layout import (
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
    bind,
    digest,
    plain,
    validate,
)  # fmt: skip
from kvferry.presets import layer_major, page_major

change = msgspec.structs.replace

K = Field("k", 8)
TENSOR = Tensor("kv", (0, 1), ((0, 2),), (K,), 0, 4096, Strides(2048, 256, 16, 8), 64, 8)
SPACE = Space("kv", 4)


def layout(tensor=TENSOR, space=SPACE, *more, **rest):
    return Layout("m", "bf16", 2, (tensor, *more), (space,), **rest)


def refused(what, value, side="prefill", **rest):
    with pytest.raises(LayoutError, match=what) as caught:
        validate(value, side, **rest)
    assert side in str(caught.value)
    assert caught.value.hint
    return caught.value


def test_a_sound_layout_is_accepted():
    validate(layout(), "decode")
    validate(layout(space=Space("kv", 4, Ranges(4, (0, 3), 4), Window(9))), "decode")
    validate(Layout("m", "bf16", 2, (), ()), "decode")


@pytest.mark.parametrize(
    ("what", "tensor"),
    [
        ("number of layers is 0", change(TENSOR, layers=())),
        ("layer id is -1", change(TENSOR, layers=(0, -1))),
        ("layer id is 2147483648", change(TENSOR, layers=(0, 2**31))),
        ("number of fields is 0", change(TENSOR, fields=())),
        ("nbytes of field 'k' is 0", change(TENSOR, fields=(change(K, nbytes=0),))),
        ("granule_tokens of field 'k' is 0", change(TENSOR, fields=(change(K, granule_tokens=0),))),
        ("length of the name of field 'kkk", change(TENSOR, fields=(change(K, name="k" * 300),))),
        ("pages is 0", change(TENSOR, pages=0)),
        ("nbytes is -4096", change(TENSOR, nbytes=-4096)),
        ("address is -8", change(TENSOR, address=-8)),
        ("page stride is -256", change(TENSOR, strides_bytes=Strides(2048, -256, 16, 8))),
        ("first head of an interval is -1", change(TENSOR, heads=((-1, 1),))),
        ("end of the head interval from 1 is 3, must be in", change(TENSOR, heads=((1, 3),))),
        ("end of the head interval from 1 is 1", change(TENSOR, heads=((1, 1),))),
        ("headed=True, heads are", change(TENSOR, heads=())),
        ("headed=False, heads are", change(TENSOR, fields=(change(K, headed=False),))),
        ("fields 'k' and 'v' differ", change(TENSOR, fields=(K, Field("v", 8, headed=False)))),
        ("granule_tokens 3 does not divide page", change(TENSOR, fields=(change(K, granule_tokens=3),))),
        ("per page, granule_tokens is 1, page_tokens 4", change(TENSOR, fields=(change(K, per="page"),))),
        ("per request, coverage is All", change(TENSOR, fields=(change(K, per="request"),))),
        ("item_bytes is 65, .* make 64", change(TENSOR, item_bytes=65)),
        ("token stride 15 is less than the 16", change(TENSOR, strides_bytes=Strides(2048, 256, 15, 8))),
        ("layer stride 60 is less than the 64", change(TENSOR, strides_bytes=Strides(60, 256, 16, 8))),
        ("last cell ends at byte 3904, nbytes is 3903", change(TENSOR, nbytes=3903)),
        ("unknown space 'swa', declared are", change(TENSOR, space="swa")),
        ("held twice: .*layer=1", change(TENSOR, layers=(1, 1))),
        ("held twice: .*head=0", change(TENSOR, heads=((0, 1), (0, 1)))),
    ],
)  # fmt: skip
def test_a_contradiction_in_a_tensor_is_named(what, tensor):
    error = refused(what, layout(tensor))
    assert "tensor 0" in error.message or "held twice" in error.message


def test_a_granule_must_fit_the_deal_unless_one_rank_holds_all():
    tensor = change(TENSOR, fields=(change(K, granule_tokens=2),), item_bytes=32)
    refused("does not divide unit_tokens 3", layout(tensor, Space("kv", 4, Cyclic(3, 2, 0))))
    validate(layout(tensor, Space("kv", 4, Cyclic(3, 1, 0))), "prefill")
    validate(layout(tensor, Space("kv", 4, Cyclic(2, 2, 0))), "prefill")


@pytest.mark.parametrize(
    ("what", "space"),
    [
        ("page_tokens is 0", Space("kv", 0)),
        ("length of name is 0", Space("", 4)),
        ("window tokens is 0", Space("kv", 4, Cyclic(), Window(0))),
        ("unit_tokens is -1", Space("kv", 4, Cyclic(-1))),
        ("deal rank is 2", Space("kv", 4, Cyclic(1, 2, 2))),
        ("deal ranks is 4294967296", Space("kv", 4, Cyclic(1, 2**32, 2))),
        ("deal parts is 4294967296", Space("kv", 4, Ranges(2**32, (0,)))),
        ("deal parts is 4097", Space("kv", 4, Ranges(4097, (0,)))),
        ("number of owned parts is 0", Space("kv", 4, Ranges(2, ()))),
        ("owned part is 2", Space("kv", 4, Ranges(2, (2,)))),
        ("owned parts repeat", Space("kv", 4, Ranges(2, (1, 1)))),
        ("coverage Slot with page_tokens 4", Space("kv", 4, Cyclic(), Slot())),
        ("coverage Rows with page_tokens 1 and deal", Space("kv", 1, Cyclic(1, 2, 0), Rows())),
    ],
)
def test_a_contradiction_in_a_space_is_named(what, space):
    refused(what, layout(space=space))


def test_space_names_must_differ():
    refused("space names repeat", Layout("m", "bf16", 2, (), (SPACE, SPACE)))


def test_state_spaces_have_a_head_axis_of_their_own():
    ssm = Field("ssm", 8, per="request")
    state = Tensor("kv", (0,), ((0, 64),), (ssm,), 0, 4096, Strides(0, 512, 0, 8), 512, 8)
    validate(layout(state, Space("kv", 1, Cyclic(), Slot())), "prefill")
    refused("head interval from 0 is 64", layout(change(state, fields=(K,)), Space("kv", 1)))


def test_the_same_bytes_in_two_tensors_are_noticed():
    other = change(TENSOR, layers=(2, 3), address=4)
    refused("tensors 0 and 1 overlap", layout(TENSOR, SPACE, other))
    refused("held twice", layout(TENSOR, SPACE, change(TENSOR, address=8192)))


def test_two_spaces_may_share_a_pool_and_nothing_else_may():
    window = Space("swa", SPACE.page_tokens)
    shared = change(TENSOR, space="swa")

    def both(*tensors):
        return Layout("m", "bf16", 2, tensors, (SPACE, window))

    validate(both(TENSOR, shared), "prefill")
    refused("tensors 0 and 1 overlap", both(TENSOR, change(shared, pages=TENSOR.pages - 1)))
    refused("tensors 0 and 1 overlap", both(TENSOR, change(shared, address=TENSOR.address + 4)))
    refused("tensors 0 and 2 overlap", both(TENSOR, shared, change(TENSOR, layers=(7, 8))))
    small = change(shared, fields=(Field("k", 4),), item_bytes=TENSOR.item_bytes // 2)
    refused("tensors 1 and 2 overlap", both(small, TENSOR, change(shared, address=6, layers=(7, 8))))


def test_an_unbound_tensor_is_noticed_where_memory_is_needed():
    unbound = page_major("m", layers=1, kv_heads=1, head_dim=4, dtype="uint8", pages=2, page_tokens=4)
    validate(unbound, "decode")
    refused("address 0x0 is not bound", unbound, "decode", bound=True)
    validate(bind(unbound, [(1 << 20, 64)]), "decode", bound=True)


@pytest.mark.parametrize(
    "hostile",
    [
        layout(change(TENSOR, heads=((0, 2**40),))),
        Layout("m", "bf16", 2, (TENSOR,) * 5000, (SPACE,)),
        Layout("m", "bf16", 2**40, (), (SPACE,)),
        Layout("m" * 10**6, "bf16", 2, (), (SPACE,)),
        Layout("m", "bf16", 2, (), (SPACE,) * 100),
        layout(change(TENSOR, nbytes=2**70)),
        layout(change(TENSOR, address=2**63)),
        layout(change(TENSOR, pages=2**50, strides_bytes=Strides(0, 0, 0, 0))),
    ],
)
def test_hostile_sizes_are_refused_without_work(hostile):
    before = time.process_time()
    refused("prefill", hostile)
    assert time.process_time() - before < 2


def test_too_many_elements_are_refused_before_they_are_spelled_out():
    ssm, heads, strides = Field("ssm", 1, per="request"), ((0, 2**19),), Strides(0, 2**19, 0, 1)
    state = Tensor("kv", (0,), heads, (ssm,), 0, 2**20, strides, 2**19, 2)
    refused("more than 262144 elements", layout(state, Space("kv", 1, Cyclic(), Slot())))


@pytest.mark.parametrize(("what", "value"), [("nbytes", 4), ("format", "fp8"), ("granule_tokens", 2)])
def test_the_heads_of_a_layer_have_one_shape(what, value):
    one = change(TENSOR, layers=(0, 1), heads=((0, 1),), strides_bytes=Strides(2048, 256, 8, 0), item_bytes=32)
    field = change(K, **{what: value})
    tokens = 4 // field.granule_tokens
    other = change(one, heads=((1, 2),), fields=(field,), item_bytes=field.nbytes * tokens, address=4096)
    text = f"tensors 0 and 1 .*{what} of field 'k' in layer 0 is {getattr(K, what)!r} and {value!r}"
    refused(text, layout(one, SPACE, other))
    validate(layout(one, SPACE, change(other, layers=(2, 3))), "prefill")
    validate(layout(one, SPACE, change(one, heads=((1, 2),), fields=(change(K),), address=4096)), "prefill")


def test_the_digest_ignores_addresses_and_nothing_else():
    one = layer_major("m", layers=2, kv_heads=2, head_dim=4, dtype="uint8", pages=4, page_tokens=4)
    assert digest(one) == digest(bind(one, [(1 << 20, 4096)]))
    assert len(digest(one)) == 32
    others = [
        change(one, model="n"),
        change(one, spaces=(Space("kv", 8),)),
        change(one, tensors=one.tensors[:-1]),
        change(one, tensors=(*one.tensors[:-1], change(one.tensors[-1], layers=(7,)))),
    ]
    assert len({digest(one), *(digest(other) for other in others)}) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        change(layout(), kv_heads=np.int64(2)),
        change(layout(), rank=Rank(tp=np.int64(0))), change(layout(), rank=(0, 0, 0, 0)), change(layout(), model=5),
        change(layout(), model="\ud800"), change(layout(), tensors=None), change(layout(), kv_heads=2**70),
        layout(change(TENSOR, nbytes=np.int64(4096))), layout(change(TENSOR, layers=range(2))),
        layout(change(TENSOR, memory=None)), layout(change(TENSOR, fields=(change(K, name="\ud800"),))),
        layout(change(TENSOR, strides_bytes=(1, 2, 3, 4))), layout(change(TENSOR, fields=(change(K, per="x"),))),
        layout(space=change(SPACE, deal=None)), layout(space=change(SPACE, page_tokens=4.5)), 5, None,
    ],
    ids=str,
)  # fmt: skip
def test_what_a_peer_could_not_read_is_refused_before_it_is_asked(wrong):
    with pytest.raises(LayoutError, match="decode layout: "):
        validate(wrong, "decode")


def test_what_can_be_read_is_taken_in_the_types_that_are_declared():
    spelled = layout(change(TENSOR, layers=[0, 1], heads=[[0, 2]], fields=[K]))
    assert plain(spelled, "the layout") == layout()


def test_ranks_are_not_negative():
    refused("rank tp is -1", change(layout(), rank=Rank(tp=-1)))
