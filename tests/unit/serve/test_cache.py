from __future__ import annotations

import mmap

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.serve.cache import PagedCache


def random_kv(rng, heads, tokens, dim=4):
    return (rng.standard_normal((heads, tokens, dim), np.float32) for _ in range(2))


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def cache():
    return PagedCache(range(2), range(3), 4, num_pages=8, page_tokens=4, dtype="float32")


def test_pages_come_scattered_and_each_once(new_cache):
    pages = new_cache(num_pages=64).allocate(64)
    assert pages.dtype == np.int32
    assert sorted(pages) == list(range(64))
    assert (np.abs(np.diff(pages)) != 1).mean() > 0.8


def test_a_freed_page_is_handed_out_again(cache):
    pages = cache.allocate(8)
    cache.free(pages[2:4])
    assert cache.num_free_pages == 2
    assert set(cache.allocate(2)) == set(pages[2:4])


def test_too_many_pages_are_refused_and_none_is_taken(cache):
    cache.allocate(3)
    with pytest.raises(InputError, match="6 KV pages wanted, 5 of 8 are free"):
        cache.allocate(6)
    with pytest.raises(InputError, match="-1 KV pages"):
        cache.allocate(-1)
    assert cache.num_free_pages == 5


def test_a_double_free_is_refused_and_nothing_is_freed(cache):
    pages = cache.allocate(4)
    cache.free(pages[:1])
    for wrong in (pages[:2], pages[[2, 2]], pages[[1, 0]]):
        with pytest.raises(InputError, match="double free"):
            cache.free(wrong)
    with pytest.raises(InputError, match="8 named"):
        cache.free(np.array([8], np.int32))
    assert cache.num_free_pages == 5


def test_what_is_written_is_gathered_in_token_order(cache, rng):
    pages = cache.allocate(3)
    k, v = random_kv(rng, 3, 11)
    for start, end in ((0, 3), (3, 9), (9, 11)):
        cache.write(1, pages, start, k[:, start:end], v[:, start:end])
    got_k, got_v = cache.gather(1, pages, 11)
    np.testing.assert_array_equal(got_k, k)
    np.testing.assert_array_equal(got_v, v)
    short_k, _ = cache.gather(1, pages, 6)
    np.testing.assert_array_equal(short_k, k[:, :6])


def test_a_write_touches_its_rows_only(cache, rng):
    pages = cache.allocate(2)
    k, v = random_kv(rng, 3, 2)
    cache.write(1, pages, 3, k, v)
    touched = np.argwhere(cache.block.any(axis=-1))
    rows = {(int(p), int(token)) for p, _, _, _, token in touched}
    assert rows == {(int(pages[0]), 3), (int(pages[1]), 0)}
    assert set(touched[:, 1]) == {1}


def test_the_block_is_page_major_with_one_run_of_bytes_per_head_slice(cache, rng):
    pages = cache.allocate(1)
    k, v = random_kv(rng, 3, 4)
    cache.write(1, pages, 0, k, v)
    raw = np.frombuffer(cache.block.tobytes(), np.float32)
    head_run = 4 * 4
    at = ((int(pages[0]) * 2 + 1) * 2 * 3 + 3 + 2) * head_run  # page, layer 1, v, head 2
    np.testing.assert_array_equal(raw[at : at + head_run], v[2].ravel())
    assert cache.nbytes == raw.nbytes == 8 * 2 * 2 * 3 * 4 * 4 * 4


def test_float16_rounds_once(rng):
    cache = PagedCache(range(1), range(2), 4, 2)
    pages = cache.allocate(1)
    k, v = random_kv(rng, 2, 5)
    cache.write(0, pages, 0, k, v)
    got, _ = cache.gather(0, pages, 5)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, k.astype(np.float16).astype(np.float32))


def test_digests_agree_across_page_sizes_and_head_slices(rng):
    whole = PagedCache(range(2), range(4), 4, 16, page_tokens=16)
    slice_ = PagedCache(range(1, 2), range(2, 4), 4, 16, page_tokens=4, seed=9)
    there, here = whole.allocate(3), slice_.allocate(10)
    for layer in range(2):
        k, v = random_kv(rng, 4, 37)
        whole.write(layer, there, 0, k, v)
        if layer == 1:
            slice_.write(1, here, 0, k[2:], v[2:])
    wanted = whole.digests(there, 37, layers=range(1, 2), heads=range(2, 4))
    assert slice_.digests(here, 37) == wanted
    assert sorted(wanted) == [(1, unit, head) for unit in range(3) for head in (2, 3)]
    assert len(set(wanted.values())) == len(wanted)


@pytest.mark.parametrize("row", range(4))
def test_digests_name_the_changed_cell_and_ignore_what_follows_the_last_token(cache, rng, row):
    pages = cache.allocate(3)
    for layer in range(2):
        cache.write(layer, pages, 0, *random_kv(rng, 3, 10))
    before = cache.digests(pages, 10, unit_tokens=4)
    cache.block[pages[2], :, :, :, 2:] = 99
    assert cache.digests(pages, 10, unit_tokens=4) == before
    cache.block[pages[1], 0, 1, 2, row, 0] += 1
    after = cache.digests(pages, 10, unit_tokens=4)
    assert {key for key in before if before[key] != after[key]} == {(0, 1, 2)}


def test_digests_see_exchanged_pages_and_exchanged_k_and_v(cache, rng):
    pages = cache.allocate(2)
    k, v = random_kv(rng, 3, 8)
    cache.write(0, pages, 0, k, v)
    digests = cache.digests(pages, 8, layers=range(1), unit_tokens=4)
    assert cache.digests(pages[::-1], 8, layers=range(1), unit_tokens=4) != digests
    cache.write(0, pages, 0, v, k)
    assert cache.digests(pages, 8, layers=range(1), unit_tokens=4) != digests


def test_layers_heads_and_pages_that_are_not_held_are_refused(rng):
    cache = PagedCache(range(4, 6), range(1, 3), 4, 4)
    pages = cache.allocate(1)
    k, v = random_kv(rng, 2, 1)
    with pytest.raises(InputError, match=r"layer 0 is not in this cache, which holds range\(4, 6\)"):
        cache.write(0, pages, 0, k, v)
    with pytest.raises(InputError, match="KV head 0"):
        cache.digests(pages, 1, heads=range(2))
    with pytest.raises(InputError, match="17 tokens do not fit in 1 pages"):
        cache.gather(4, pages, 17)
    with pytest.raises(InputError, match="KV pages -1 to -1 named, this cache has 4"):
        cache.write(4, np.array([-1], np.int32), 0, k, v)


def test_given_memory_is_used_and_its_content_kept():
    memory = mmap.mmap(-1, 4096)
    memory[:2] = np.float16(1.5).tobytes()
    cache = PagedCache(range(1), range(1), 8, 2, memory=memory)
    assert cache.block[0, 0, 0, 0, 0, 0] == 1.5
    cache.block[0, 0, 0, 0, 0, 1] = 2
    assert memory[2:4] == np.float16(2).tobytes()
    assert cache.address == np.frombuffer(memory, np.uint8).ctypes.data
    assert cache.nbytes == 2 * 2 * 16 * 8 * 2


@pytest.mark.parametrize(
    ("memory", "says"), [(bytearray(10), "has 10, writable"), (memoryview(bytes(4096)), "read-only")]
)
def test_memory_that_can_not_hold_the_cache_is_refused(memory, says):
    with pytest.raises(InputError, match=says):
        PagedCache(range(1), range(1), 8, 2, memory=memory)


@pytest.mark.parametrize("change", [{"num_pages": 0}, {"head_dim": 0}, {"layers": range(0)}, {"heads": range(0, 4, 2)}])
def test_impossible_sizes_are_refused(change):
    sizes = {"layers": range(1), "heads": range(1), "head_dim": 4, "num_pages": 2} | change
    with pytest.raises(InputError, match="every size must be positive"):
        PagedCache(**sizes)
