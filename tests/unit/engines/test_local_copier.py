"""Large batches in parts, by several threads: the same bytes, and every part over before anything is said."""

import os
import threading
import time

import numpy as np
import pytest

from kvferry.engines.local import copier
from kvferry.engines.local.copier import Copier
from kvferry.engines.rows import SPLIT_BYTES, cut
from kvferry.plan import Batch

ROW = 4096


@pytest.fixture(params=[1, 2, 3, 16])
def made(request):
    found = Copier(request.param)
    yield found
    found.close()


def batch_of(source, target, rows, seed=1):
    rng = np.random.default_rng(seed)
    src, dst = (rng.permutation(len(memory) // ROW)[:rows] for memory in (source, target))
    at, to = (memory.ctypes.data + places * ROW for memory, places in ((source, src), (target, dst)))
    return src, dst, Batch(at.astype(np.uint64), to.astype(np.uint64), np.full(rows, ROW, np.uint64), rows * ROW)


@pytest.mark.parametrize("rows", [1, 2, 33, SPLIT_BYTES // ROW, 5 * SPLIT_BYTES // ROW + 7])
def test_every_row_arrives_whatever_the_number_of_threads(made, rows):
    source = np.random.default_rng(0).integers(0, 255, 2 * rows * ROW, np.uint8)
    target = np.zeros(3 * rows * ROW, np.uint8)
    src, dst, batch = batch_of(source, target, rows)
    assert made.write(os.getpid(), batch) == ("", "")
    shape = (-1, ROW)
    assert (target.reshape(shape)[dst] == source.reshape(shape)[src]).all()
    others = np.setdiff1d(np.arange(3 * rows), dst)
    assert not target.reshape(shape)[others].any()


def test_a_row_that_can_not_be_written_is_named_whichever_thread_finds_it(made):
    rows = 2 * SPLIT_BYTES // ROW
    source, target = (np.ones(2 * rows * ROW, np.uint8) for _ in range(2))
    for bad in (3, rows - 2):
        _, _, batch = batch_of(source, target, rows)
        batch.dst[bad] = 8
        cause, native = made.write(os.getpid(), batch)
        assert native == "EFAULT"
        assert f"in row {bad} of {rows} ({ROW} bytes from " in cause


def test_it_returns_when_no_part_is_under_way_any_more(monkeypatch):
    running, seen = [], []

    def slow(pid, part):
        running.append(part)
        copied = real(pid, part)
        running.pop()
        return copied

    real = copier.copy_rows
    monkeypatch.setattr(copier, "copy_rows", slow)
    made = Copier(2)
    source, target = (np.ones(1 << 23, np.uint8) for _ in range(2))
    for seed in range(20):
        _, _, batch = batch_of(source, target, 1024, seed)
        batch.dst[0] = 8  # this thread's part ends at once
        made.write(os.getpid(), batch)
        seen.append(len(running))
    made.close()
    assert seen == [0] * 20


@pytest.mark.parametrize("sizes", [[1], [10], [3, 4], [1, 1, 1, 1], [5, 0x1000, 7], [100] * 50])
def test_cutting_at_any_byte_loses_none(sizes):
    nbytes = np.array(sizes, np.uint64)
    src = np.cumsum(nbytes) * np.uint64(3)
    batch = Batch(src, src + np.uint64(1 << 40), nbytes, sum(sizes))
    pairs = [
        (int(a) + i, int(b) + i)
        for a, b, n in zip(batch.src, batch.dst, nbytes.tolist(), strict=True)
        for i in range(n)
    ]
    rows = np.repeat(np.arange(len(sizes)), sizes)
    for low in range(0, len(pairs), max(1, len(pairs) // 9)):
        for high in range(low + 1, len(pairs) + 1, max(1, len(pairs) // 9)):
            part, begin = cut(batch, low, high)
            found = [
                (int(a) + i, int(b) + i)
                for a, b, n in zip(part.src, part.dst, part.nbytes.tolist(), strict=True)
                for i in range(n)
            ]
            assert found == pairs[low:high]
            assert (part.total_bytes, begin) == (high - low, rows[low])


def test_where_no_thread_is_to_be_had_one_copies_and_nothing_stays_behind(monkeypatch, caplog):
    made = Copier(3)
    source, target = np.ones(1 << 22, np.uint8), np.zeros(1 << 22, np.uint8)
    _, dst, batch = batch_of(source, target, 512)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert made.write(os.getpid(), batch) == ("", "")
    assert target.reshape(-1, ROW)[dst].all()
    assert "1 threads copy, 3 were asked for: can't start new thread" in caplog.text
    monkeypatch.undo()
    target[:] = 0
    _, other, batch = batch_of(source, target, 300, seed=5)
    assert made.write(os.getpid(), batch) == ("", "")
    assert not target.reshape(-1, ROW)[np.setdiff1d(np.arange(1024), other)].any(), "nothing of the first batch"
    made.close()


def test_what_a_part_raises_is_raised_when_all_parts_are_over(monkeypatch):
    made, over = Copier(2), []

    def copy(pid, batch):
        if int(batch.src[0]) % 2:
            raise ValueError("a mistake")
        time.sleep(0.2)
        over.append(1)
        return batch.total_bytes, None

    monkeypatch.setattr(copier, "copy_rows", copy)
    nbytes = np.full(512, ROW, np.uint64)
    for odd in (0, 300):
        src = np.arange(512, dtype=np.uint64) * np.uint64(2 * ROW)
        src[odd] += np.uint64(1)
        src = np.where(np.arange(512) // 256 == odd // 256, src | np.uint64(1), src)
        with pytest.raises(ValueError, match="a mistake"):
            made.write(1, Batch(src, src, nbytes, 512 * ROW))
        assert over.pop() == 1
    made.close()
