"""What a model's request has to leave in memory, held against the oracle's loops; and what fits into the memory."""

import itertools

import msgspec
import numpy as np
import pytest

from kvferry.bench import model_case
from kvferry.bench.bare_rows import joined, planned
from kvferry.bench.model_case import MAX_RANKS, fitted, layouts
from kvferry.bench.model_request import ModelRequest
from kvferry.bench.positions import first_kept, held, page_count
from kvferry.bench.strided import GUARD, Places
from kvferry.bench.transfer_spec import TransferSpec
from kvferry.errors import InputError
from kvferry.free_memory import FreeMemory
from kvferry.layout import Cyclic, Ranges, Rows, Slot, Space, Window, bind
from kvferry.plan import Limits, PageList
from kvferry.presets import MODELS
from kvferry.testing.oracle import cells, copy_batches, covered_positions, pages_of, slots_of

DEALS = [Cyclic(), Cyclic(1, 3, 2), Cyclic(16, 2, 1), Ranges(2, (1,), 16), Ranges(4, (1, 2), 8)]
COVERAGES = [Space().coverage, Window(20), Slot()]


@pytest.mark.parametrize("tokens", [1, 15, 16, 100])
@pytest.mark.parametrize(("deal", "coverage"), list(itertools.product(DEALS, COVERAGES)))
def test_positions_and_slots_are_those_of_the_loops(deal, coverage, tokens):
    is_slot = isinstance(coverage, Slot)
    space = Space("kv", 1 if is_slot else 16, Cyclic() if is_slot else deal, coverage)
    found = held(space, tokens)
    assert dict(zip(found.position.tolist(), found.slot.tolist(), strict=True)) == slots_of(space, 0, tokens)
    assert page_count(space, found) == len(pages_of(space, 0, tokens))
    assert first_kept(space, tokens) == covered_positions(space, 0, tokens)[0]


def test_rows_are_refused():
    with pytest.raises(InputError, match="space aux is made of rows"):
        held(Space("aux", 1, Cyclic(), Rows()), 3)


GRIDS = [
    ("llama-3.1-8b", "tp=2", "order=hnd,arrange=block,page=32"),
    ("gpt-oss-20b", "arrange=page", "tp=4,page=48"),
    ("deepseek-r1", "cp=2,deal=zigzag", "dcp=2"),
    ("qwen3-next-80b-a3b", "tp=2", "pp=2,cache=vllm-hnd"),
    ("qwen3-235b-a22b", "tp=8", "tp=2,pp=2"),
]


def small(model, prefill, decode, inflight=2, tokens=70, **options):
    """A request of a few layers."""
    case = fitted(model, tokens, prefill, decode, inflight)
    case = model_case.measured(msgspec.structs.replace(case, layers=4), inflight)
    return ModelRequest(TransferSpec(case=case, inflight=inflight, **options), case), case


def blocks_of(pools):
    return [(pool.ctypes.data, pool.nbytes) for pool in pools]


@pytest.mark.parametrize(("model", "prefill", "decode"), GRIDS)
@pytest.mark.parametrize("order", ["shuffle", "contig", "reverse"])
def test_the_planners_rows_are_what_is_expected(model, prefill, decode, order):
    request, case = small(model, prefill, decode, order=order)
    here, there = pools = [
        [np.zeros(size, np.uint8) for size in request.pool_bytes(side)] for side in ("prefill", "decode")
    ]
    for side, found in zip(("prefill", "decode"), pools, strict=True):
        request.begin(side, found)
    for round_number in (1, 2):
        request.fill(here, round_number)
        batches = planned(request, blocks_of(here), blocks_of(there), Limits(rows=300, bytes=1 << 20))
        assert copy_batches(batches) == case.nbytes
        assert request.check(there, round_number) == ""
    assert request.check(there, 2) != ""  # what was there was taken away
    assert len(joined(batches)) == sum(map(len, batches))
    assert joined(batches).total_bytes == case.nbytes


@pytest.mark.parametrize(("model", "prefill", "decode"), GRIDS)
def test_elements_lie_where_the_oracle_finds_them(model, prefill, decode):
    request, case = small(model, prefill, decode, inflight=1, tokens=37)
    for rank, layout in enumerate(request.layouts("prefill")):
        pool = np.zeros(request.pool_bytes("prefill")[rank], np.uint8)
        (share,) = (share for share in request.shares("prefill") if share.rank == rank)
        lists = {
            space.name: PageList(
                share.pages if space.name == "kv" else share.states[space.name],
                pages_of(space, 0, 37)[0] * space.page_tokens if pages_of(space, 0, 37) else 0,
            )
            for space in layout.spaces
        }
        bound = bind(layout, [(0, pool.nbytes)])
        wanted = np.zeros(pool.nbytes, bool)
        for address, nbytes in cells(bound, lists, 0, 37).values():
            wanted[address : address + nbytes] = True
        pools = [np.zeros(size, np.uint8) for size in request.pool_bytes("prefill")]
        request.fill(pools, 1)
        words = pools[rank].view(np.uint64)
        assert ((words != 0) == wanted[::8]).all()
        assert wanted.sum() % 8 == 0
        assert len(np.unique(words[words != 0])) == wanted.sum() // 8  # no word twice
    assert case.nbytes > 0


@pytest.mark.parametrize("at", [0, -1])
def test_one_wrong_word_anywhere_is_seen(at):
    request, _ = small("llama-3.1-8b", "", "tp=2", inflight=1)
    here, there = ([np.zeros(size, np.uint8) for size in request.pool_bytes(side)] for side in ("prefill", "decode"))
    request.begin("decode", there)
    request.fill(here, 1)
    batches = planned(request, blocks_of(here), blocks_of(there), Limits())
    copy_batches(batches)
    words = there[1].view(np.uint64)
    sent, others = np.flatnonzero(words != GUARD), np.flatnonzero(words == GUARD)
    words[sent[at]] ^= np.uint64(1 << 63)
    assert "tp1: " in request.check(there, 1)
    request.begin("decode", there)
    copy_batches(batches)
    words[others[at]] = 7
    wanted = (
        f"round 1: byte {8 * others[at]} of the memory of rank dp0 pp0 cp0 tp1 differs, which belongs to no request"
    )
    assert request.check(there, 1) == wanted


def test_places_are_cut_into_pieces_that_cover_all():
    view = np.zeros((10, 16, 1, 1), np.uint64)
    slot = np.arange(160)
    places = Places("k", view, np.array([0]), 0, slot // 16, slot % 16, np.arange(160), 160)
    places.write(1)
    assert len(np.unique(view)) == 160
    assert places.take(1) == ""
    assert (view == GUARD).all()


def free(monkeypatch, nbytes):
    monkeypatch.setattr(model_case, "free_memory", lambda: FreeMemory(nbytes, "this machine"))


def test_a_request_that_fits_is_what_was_asked_for(monkeypatch):
    free(monkeypatch, 8 << 30)
    case = fitted("LLAMA-3.1-8b", 4096, "", "")
    assert (case.model, case.tokens, case.layers, case.is_scaled) == ("llama-3.1-8b", 4096, 32, False)
    assert case.nbytes == 4096 * 32 * 2 * 8 * 128 * 2 == 512 << 20
    assert case.memory_bytes == case.nbytes + 2 * case.nbytes * (256 + 16) // 256


def test_short_memory_takes_tokens_first_and_layers_then(monkeypatch):
    free(monkeypatch, 500 << 20)
    case = fitted("llama-3.1-8b", 4096, "", "")
    assert (case.tokens, case.layers, case.tokens_asked, case.model_layers) == (1024, 32, 4096, 32)
    free(monkeypatch, 50 << 20)
    case = fitted("llama-3.1-8b", 4096, "", "")
    assert (case.tokens, case.layers) == (256, 8)
    assert case.memory_bytes < 50 << 20
    assert {layer for tensor in layouts(case, "decode", 1)[0].tensors for layer in tensor.layers} == set(range(8))


def test_what_can_not_be_made_small_enough_is_refused(monkeypatch):
    free(monkeypatch, 1 << 20)
    with pytest.raises(InputError, match=r"256 tokens, 1 layers of qwen3-8b need [0-9]+ bytes; [0-9]+ are free"):
        fitted("qwen3-8b", 4096, "", "")
    with pytest.raises(InputError, match="36 layers of qwen3-8b"):
        fitted("qwen3-8b", 4096, "pp=2,stages=18/18", "")  # the stages say how many layers there are
    free(monkeypatch, 32 << 20)
    assert fitted("qwen3-8b", 256, "pp=4", "").layers == 4


WRONG = {
    "no tokens": (("qwen3-8b", 0, "", ""), "--tokens 0 is not between 1 and"),
    "no model": (("qwen", 1, "", ""), "unknown model 'qwen'"),
    "no grid": (("qwen3-8b", 1, "tq=2", ""), "--prefill: 'tq=2'"),
    "too many ranks": (("qwen3-8b", 1, "", "tp=8,cp=16"), f"--decode: 128 ranks are more than {MAX_RANKS}"),
    "too many stages": (("qwen3-8b", 1, "", "pp=64"), "--decode: pp=64 stages for 36 layers"),
    "other types": (("qwen3-8b", 1, "dtype=int8", ""), "--prefill and --decode do not fit: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_measured_is_refused(name):
    arguments, words = WRONG[name]
    with pytest.raises(InputError, match=words):
        fitted(*arguments)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_made_of_whole_words(model):
    request, _ = small(model, "", "", inflight=1, tokens=1) if model != "gemma-3-27b" else (None, None)
    if request is None:
        pytest.skip("its first full layer is the sixth")
    here, there = ([np.zeros(size, np.uint8) for size in request.pool_bytes(side)] for side in ("prefill", "decode"))
    request.begin("decode", there)
    request.fill(here, 1)
    copy_batches(planned(request, blocks_of(here), blocks_of(there), Limits()))
    assert request.check(there, 1) == ""
