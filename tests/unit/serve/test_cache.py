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
    assert cache.block.nbytes == raw.nbytes == 8 * 2 * 2 * 3 * 4 * 4 * 4


def test_float16_rounds_once(rng):
    cache = PagedCache(range(1), range(2), 4, 2)
    pages = cache.allocate(1)
    k, v = random_kv(rng, 2, 5)
    cache.write(0, pages, 0, k, v)
    got, _ = cache.gather(0, pages, 5)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, k.astype(np.float16).astype(np.float32))


def test_what_is_read_fills_another_cache_with_the_same_bits(rng):
    here, there = (
        PagedCache(range(1, 3), range(2), 4, 8),
        PagedCache(range(1, 3), range(2), 4, 40, page_tokens=4, seed=9),
    )
    pages, others = here.allocate(3), there.allocate(10)
    written = [np.stack(list(random_kv(rng, 2, 37))) for _ in range(2)]
    for layer, (k, v) in enumerate(written, 1):
        here.write(layer, pages, 0, k, v)
    values = here.read(pages, 37)
    np.testing.assert_array_equal(values, np.array(written, np.float16))
    there.fill(others, values)
    assert there.read(others, 37).tobytes() == values.tobytes()
    assert there.read(others, 10).tobytes() == values[:, :, :, :10].tobytes()


def test_layers_heads_and_pages_that_are_not_held_are_refused(rng):
    cache = PagedCache(range(4, 6), range(1, 3), 4, 4)
    pages = cache.allocate(1)
    k, v = random_kv(rng, 2, 1)
    with pytest.raises(InputError, match=r"layer 0 is not in this cache, which holds range\(4, 6\)"):
        cache.write(0, pages, 0, k, v)
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
    assert cache.block.ctypes.data == np.frombuffer(memory, np.uint8).ctypes.data
    assert cache.block.nbytes == 2 * 2 * 16 * 8 * 2


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
