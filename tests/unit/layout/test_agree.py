"""`supports` and `covers` answer in words that name the field, both values and the way out."""

import msgspec
import pytest

from kvferry.ids import Rank
from kvferry.layout import Cyclic, Field, Ranges, Rows, Space, Strides, Window, covers, supports
from kvferry.presets import layer_major, mla, page_major

change = msgspec.structs.replace
SHAPE = {"layers": 4, "kv_heads": 2, "head_dim": 4, "dtype": "bfloat16", "pages": 4, "page_tokens": 4}


def make(preset=page_major, **rest):
    return preset("m", **{**SHAPE, **rest})


def test_equal_and_differently_arranged_layouts_support_each_other():
    assert supports(make(), make())
    assert supports(make(), make(layer_major, page_tokens=16, heads=(0, 1), layer_ids=[3]))


@pytest.mark.parametrize(
    ("words", "dst"),
    [
        (("model", "'m'", "'n'"), change(make(), model="n")),
        (("dtype", "'bfloat16'", "'float16'"), make(dtype="float16")),
        (("kv_heads", "2", "4"), make(kv_heads=4)),
        (("head_dim", "4", "8"), make(head_dim=8)),
        (("spaces", "['kv']", "['swa']"), change(make(), spaces=(Space("swa"),))),
        (("coverage of space 'kv'", "All()", "Window(tokens=9)"),
         change(make(), spaces=(Space("kv", 4, Cyclic(), Window(9)),))),
    ],
)  # fmt: skip
def test_what_differs_is_named_with_both_values(words, dst):
    reason = supports(make(), dst).reason
    assert all(word in reason for word in words), reason


def test_rows_of_another_size_are_named_with_both_values():
    src, dst = (change(make(), spaces=(Space("kv", tokens, Cyclic(), Rows()),)) for tokens in (4, 16))
    assert "rows of space 'kv': prefill's are of 4 tokens, decode's of 16" in supports(src, dst).reason


@pytest.mark.parametrize(
    ("what", "value"), [("format", "fp8_block"), ("nbytes", 9), ("headed", False), ("granule_tokens", 4)]
)
def test_a_field_that_differs_is_named_with_both_values(what, value):
    src = make()
    v = src.tensors[1]
    dst = change(src, tensors=(src.tensors[0], change(v, fields=(change(v.fields[0], **{what: value}),))))
    reason = supports(src, dst).reason
    assert f"{what} of field 'v' in space 'kv', layer 0" in reason
    assert repr(value) in reason
    assert repr(getattr(v.fields[0], what)) in reason


def two_layers(first_bytes, second_bytes):
    """A latent cache whose two layers are of different width."""
    one = mla("m", layers=2, latent_dim=4, dtype="uint8", pages=2, page_tokens=4)
    tensors, at = [], 0
    for tensor, nbytes in zip(one.tensors, (first_bytes, second_bytes), strict=True):
        field, strides = change(tensor.fields[0], nbytes=nbytes), Strides(page=4 * nbytes, token=nbytes)
        wide = {"nbytes": 8 * nbytes, "item_bytes": 4 * nbytes, "strides_bytes": strides, "address": at}
        tensors.append(change(tensor, fields=(field,), **wide))
        at += 8 * nbytes
    return change(one, tensors=tuple(tensors))


def test_layers_of_one_field_are_compared_one_by_one():
    """Layer 0 differs, the last one does not."""
    reason = supports(two_layers(4, 8), two_layers(8, 8)).reason
    assert "nbytes of field 'latent' in space 'kv', layer 0: prefill has 4, decode has 8" in reason
    assert supports(two_layers(4, 8), two_layers(4, 8))


def test_a_stage_without_the_wider_layers_is_no_obstacle():
    both = two_layers(4, 8)
    stages = [change(both, tensors=(tensor,)) for tensor in both.tensors]
    assert all(supports(stage, both) for stage in stages)
    assert supports(*stages), "they have no layer in common"
    assert covers(stages, both) == ""


def test_all_pipeline_stages_together_cover_what_one_alone_does_not():
    stages = [make(layer_ids=[0, 1]), make(layer_ids=[2, 3])]
    assert covers(stages, make(layer_major)) == ""
    reason = covers(stages[:1], make())
    assert "space 'kv', layer 2, field 'k', head 0, and 7 more (layers 2-3)" in reason


def test_draft_layers_that_only_decode_has_are_named():
    reason = covers([make()], make(layers=8, layer_ids=[0, 1, 2, 3, 5, 7]))
    assert "layer 5" in reason
    assert "(layers 5, 7)" in reason


def test_draft_layers_that_decode_declares_optional_are_left_alone():
    drafts = make(layers=8, layer_ids=[0, 1, 2, 3, 5, 7])
    tensors = tuple(
        part
        for tensor in drafts.tensors
        for part in (change(tensor, layers=(0, 1, 2, 3)), change(tensor, layers=(5, 7), optional=True))
    )
    dst = change(drafts, tensors=tensors)
    assert covers([make()], dst) == ""
    assert covers([make(layer_ids=[0, 1]), make(layer_ids=[2, 3])], dst) == ""
    assert "layer 3" in covers([make(layer_ids=[0, 1, 2])], dst)
    assert "decode needs token 0" in covers([make(layers=8, layer_ids=[0, 1, 2, 3, 5, 7], deal=Cyclic(4, 2, 1))], dst)


def test_the_tokens_that_an_opaque_field_covers_are_said():
    def scaled(page_tokens, granule):
        src = make(page_tokens=page_tokens)
        k, v = src.tensors
        field = Field("v", 3, granule_tokens=granule, format="block")
        return change(src, tensors=(k, change(v, fields=(field,))))

    assert supports(make(), make()).granule_tokens == 1
    assert supports(scaled(16, 8), scaled(32, 8)).granule_tokens == 8
    assert not supports(scaled(16, 8), scaled(16, 16))


def test_a_head_that_no_rank_holds_is_named():
    assert "head 1" in covers([make(heads=(0, 1))], make())
    assert covers([make(heads=(0, 1)), make(heads=(1, 2))], make()) == ""


def test_no_sources_cover_nothing():
    assert "layer 0" in covers([], make())
    assert covers([], change(make(), tensors=())) == ""


def test_a_missing_context_parallel_rank_is_noticed():
    ranks = [make(deal=Cyclic(4, 2, r)) for r in range(2)]
    assert covers(ranks, make()) == ""
    assert "decode needs token 4" in covers(ranks[:1], make())
    assert covers(ranks[:1], make(deal=Cyclic(4, 4, 2))) == "", "this rank needs no token of the missing one"


def test_a_context_parallel_rank_missing_in_one_stage_is_noticed():
    grid = [make(layer_ids=[p], layers=2, deal=Ranges(2, (c,))) for p in range(2) for c in range(2)]
    assert covers(grid, make(layers=2)) == ""
    assert "lack it" in covers(grid[:3], make(layers=2))


@pytest.mark.parametrize(
    ("wanted", "owned", "words"),
    [
        (Cyclic(), [Cyclic(1 << 17, 2, 0)], "decode needs token 131072 "),
        (Cyclic(1 << 17, 2, 1), [Cyclic(1 << 16, 2, 0)], "decode needs token 196608 "),
        (Cyclic(), [Ranges(2, (0,), 1 << 18)], "decode needs token 8589934592 "),
        # of 80 tokens one has 48, the other the last 16
        (Cyclic(), [Ranges(2, (0,), 16), Ranges(2, (1,), 32)], "it can't be shown"),
        (Ranges(2, (0,), 32), [Ranges(2, (0,), 16)], "it can't be shown"),
        (Ranges(4, (0, 1), 4), [Ranges(2, (0,), 4)], "it can't be shown"),
        (Cyclic(7, 1 << 16, 0), [Cyclic(7, 3 << 14, rank) for rank in range(0, 3 << 14, 1 << 14)], "it can't be shown"),
    ],
)
def test_tokens_that_are_missing_of_some_request_are_noticed_however_deals_differ(wanted, owned, words):
    sources = [make(deal=deal, rank=Rank(cp=number)) for number, deal in enumerate(owned)]
    assert words in covers(sources, make(deal=wanted))


@pytest.mark.parametrize(
    ("wanted", "owned"),
    [
        (Ranges(2, (0,), 32), [Ranges(3, (part,), 16) for part in range(3)]),
        (Ranges(2, (0,), 32), [Ranges(2, (0,), 32)]),
        (Ranges(4, (0,), 8), [Ranges(4, (0, 3), 8), Cyclic(4, 2, 1)]),
        (Cyclic(4, 4, 2), [Cyclic(4, 2, 0), Ranges(2, (1,), 8)]),
        (Cyclic(1, 2, 1), [Cyclic(1, 4, 1), Cyclic(1, 4, 3)]),
        (Cyclic(1 << 20, 1 << 10, 5), [Cyclic(1 << 20, 2, 1)]),
        (Ranges(1 << 16, (5,), 3), [Cyclic(1 << 20, 2, rank) for rank in range(2)]),
    ],
)
def test_deals_that_differ_cover_each_other_where_it_is_certain(wanted, owned):
    sources = [make(deal=deal, rank=Rank(cp=number)) for number, deal in enumerate(owned)]
    assert covers(sources, make(deal=wanted)) == ""


def test_what_is_missing_is_said_in_few_words():
    odd = Ranges(1 << 15, tuple(range(1, 1 << 15, 2)), 4)
    reason = covers([make(deal=odd)], make())
    assert "decode needs token 0" in reason
    assert "hold [16384 of 32768 ranges in units of 4]" in reason
    reason = covers([make(deal=Cyclic(4, 16, cp), rank=Rank(cp=cp)) for cp in range(15)], make())
    assert "and 11 more] lack it" in reason
    assert len(reason) < 500


def test_a_source_without_the_space_holds_nothing_of_it():
    other = change(make(), spaces=(Space("swa", 4),), tensors=())
    assert covers([make(), other], make()) == ""


def test_latent_caches_of_all_ranks_support_each_other():
    one = mla("m", layers=2, latent_dim=8, dtype="bfloat16", pages=2, page_tokens=4)
    assert supports(one, one)
    assert covers([one], one) == ""


def test_rows_of_another_length_do_not_fit():
    src, dst = (change(make(page_tokens=p), spaces=(Space("kv", p, coverage=Rows()),)) for p in (4, 16))
    assert supports(src, src)
    assert "rows of space 'kv': prefill's are of 4 tokens, decode's of 16" in supports(src, dst).reason
