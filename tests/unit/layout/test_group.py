"""A rank's group is refused where the ranks can't share out anything by it."""

import msgspec
import pytest

from kvferry.errors import LayoutError
from kvferry.ids import Rank
from kvferry.layout import bind, validate_group
from kvferry.presets import attention, layouts_of, parse_grid

change = msgspec.structs.replace
MODEL = attention("m", layers=2, kv_heads=4, head_dim=4)
GROUP = layouts_of(MODEL, parse_grid("tp=2,page=16"), 8)


def test_a_group_with_the_rank_in_it_is_fine_however_its_memory_is_arranged():
    validate_group(GROUP[1], (), "prefill")
    validate_group(GROUP[0], (), "decode")
    validate_group(bind(GROUP[1], [(1 << 20, 1 << 20)]), GROUP, "decode")
    validate_group(layouts_of(MODEL, parse_grid("tp=2,page=16,order=hnd,arrange=page"), 4)[0], GROUP, "decode")


def test_a_decode_rank_that_has_others_beside_it_must_name_them():
    with pytest.raises(LayoutError, match="tp1 has ranks beside it, and none is declared"):
        validate_group(GROUP[1], (), "decode")


@pytest.mark.parametrize(
    ("words", "group"),
    [
        ("dp0 pp0 cp0 tp0 is not among its ranks dp0 pp0 cp0 tp1", GROUP[1:]),
        ("tp8 and 1 more", [change(GROUP[1], rank=Rank(tp=tp)) for tp in range(1, 10)]),
        ("dp0 pp0 cp0 tp1 is there twice", [*GROUP, GROUP[1]]),
        ("has other spaces, layers", [change(GROUP[1], rank=GROUP[0].rank), change(GROUP[0], rank=GROUP[1].rank)]),
        ("has other spaces, layers", [change(GROUP[0], tensors=GROUP[0].tensors[:1]), GROUP[1]]),
        ("has other spaces, layers", layouts_of(MODEL, parse_grid("tp=2,page=32"), 8)),
        ("group member 1 .*kv_heads is -1", [GROUP[0], change(GROUP[1], kv_heads=-1)]),
    ],
)
def test_a_group_that_is_none_is_refused(words, group):
    with pytest.raises(LayoutError, match=words) as caught:
        validate_group(GROUP[0], group, "decode")
    assert str(caught.value).startswith("decode group")
    assert caught.value.hint
